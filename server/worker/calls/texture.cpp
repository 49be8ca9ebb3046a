// Texture and surface objects over memory: the driver reads what a kernel asks for, so the memory must be the
// session's. Tensor maps: encoded by the driver, which reads no memory for it; their address is a kernel's
// like any other.
#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using TexCreate = GPUPOOL_ROW(cuTexObjectCreate);
using SurfCreate = GPUPOOL_ROW(cuSurfObjectCreate);

bool ownsResource(Session& session, const CUDA_RESOURCE_DESC& resource) {
  switch (resource.resType) {
    case CU_RESOURCE_TYPE_LINEAR:
      return session.space().owns(resource.res.linear.devPtr, resource.res.linear.sizeInBytes);
    case CU_RESOURCE_TYPE_PITCH2D: {
      auto& plane = resource.res.pitch2D;
      unsigned __int128 bytes = static_cast<unsigned __int128>(plane.pitchInBytes) * plane.height;
      return bytes <= SIZE_MAX && session.space().owns(plane.devPtr, static_cast<size_t>(bytes));
    }
    default:
      return true;  // arrays are handles, and those are checked
  }
}

template <class R, auto Member>
void create(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  auto& resource = served.template get<"pResDesc">();
  bool ours = !resource.wanted() || ownsResource(session, resource.plain());
  served.close(ours ? served.invoke(session.driver().*Member) : CUDA_ERROR_INVALID_VALUE);
}

}  // namespace

void addTextureHandlers(HandlerTable& table) {
  table.add<TexCreate>(&create<TexCreate, &Driver::cuTexObjectCreate>);
  table.add<SurfCreate>(&create<SurfCreate, &Driver::cuSurfObjectCreate>);
}

}  // namespace gpupool::server

// Arrays: the driver makes their memory, and the lease's account has it. They are cleared before a program
// has them.
#include <algorithm>

#include "schema/array_format.h"
#include "server/worker/array_scrub.h"
#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using ArrayCreate = GPUPOOL_ROW(cuArrayCreate_v2);
using Array3DCreate = GPUPOOL_ROW(cuArray3DCreate_v2);
using MipmapCreate = GPUPOOL_ROW(cuMipmappedArrayCreate);
using ArrayDestroy = GPUPOOL_ROW(cuArrayDestroy);
using MipmapDestroy = GPUPOOL_ROW(cuMipmappedArrayDestroy);

// Of formats with several planes or compressed blocks, no fewer than they take.
uint64_t elementBytes(CUarray_format format, unsigned channels) {
  const size_t bytes = schema::arrayElementBytes(format, channels);
  return bytes != 0 ? bytes : uint64_t{4} * std::max(channels, 1u);
}

// An array of `levels` levels, each half as wide as the one before; as the driver allots it, in pieces of 512
// bytes. Memory that is mapped later counts then.
uint64_t bytesOf(const CUDA_ARRAY3D_DESCRIPTOR_v2& array, unsigned levels) {
  if ((array.Flags & (CUDA_ARRAY3D_DEFERRED_MAPPING | CUDA_ARRAY3D_SPARSE)) != 0) return 0;
  const bool layered = (array.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
  constexpr size_t kMost = size_t{1} << 20;  // the driver refuses larger ones
  size_t width = std::clamp<size_t>(array.Width, 1, kMost),
         height = std::clamp<size_t>(array.Height, 1, kMost),
         depth = std::clamp<size_t>(array.Depth, 1, kMost);
  unsigned __int128 total = 0;
  for (unsigned level = 0; level < std::min(std::max(levels, 1u), 32u); ++level) {
    const unsigned __int128 bytes = static_cast<unsigned __int128>(width) * height * depth *
                                    elementBytes(array.Format, std::min(array.NumChannels, 4u));
    total += (bytes + 511) / 512 * 512;
    width = std::max<size_t>(width / 2, 1);
    height = std::max<size_t>(height / 2, 1);
    if (!layered) depth = std::max<size_t>(depth / 2, 1);
  }
  return static_cast<uint64_t>(std::min<unsigned __int128>(total, UINT64_MAX / 2));
}

CUDA_ARRAY3D_DESCRIPTOR_v2 wide(const CUDA_ARRAY_DESCRIPTOR_v2& d) {
  return {d.Width, d.Height, 0, d.Format, d.NumChannels, 0};
}
CUDA_ARRAY3D_DESCRIPTOR_v2 wide(const CUDA_ARRAY3D_DESCRIPTOR_v2& d) { return d; }

unsigned currentDevice(Session& session) {
  CUdevice device = 0;
  if (session.driver().cuCtxGetDevice(&device) != CUDA_SUCCESS) return ~0u;
  const auto& devices = session.objects().devices();
  return static_cast<unsigned>(std::find(devices.begin(), devices.end(), device) - devices.begin());
}

// Creates and clears; an array that cannot be cleared is not handed out.
template <class R, auto Member>
CUresult makeCleared(Session& session, Served<R>& served) {
  const Driver& driver = session.driver();
  CUresult status = served.invoke(driver.*Member);
  if (status != CUDA_SUCCESS) return status;
  auto& made = *served.template get<"pHandle">().pass();
  if constexpr (std::is_same_v<R, MipmapCreate>) {
    status = clearMipmap(driver, made, served.template get<"numMipmapLevels">().value());
    if (status != CUDA_SUCCESS) driver.cuMipmappedArrayDestroy(made);
  } else {
    status = clearArray(driver, made);
    if (status != CUDA_SUCCESS) driver.cuArrayDestroy(made);
  }
  return status;
}

template <class R, auto Member>
void create(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  const CUDA_ARRAY3D_DESCRIPTOR_v2* shape = nullptr;
  CUDA_ARRAY3D_DESCRIPTOR_v2 whole{};
  unsigned levels = 1;
  uint64_t id = 0;
  if constexpr (std::is_same_v<R, MipmapCreate>) {
    auto& wanted = served.template get<"pMipmappedArrayDesc">();
    if (wanted.wanted()) shape = &(whole = wide(wanted.plain()));
    levels = served.template get<"numMipmapLevels">().value();
  } else {
    auto& wanted = served.template get<"pAllocateArray">();
    if (wanted.wanted()) shape = &(whole = wide(wanted.plain()));
  }
  id = served.template get<"pHandle">().id();
  const uint64_t bytes = shape != nullptr ? bytesOf(*shape, levels) : 0;
  const unsigned device = currentDevice(session);
  if (bytes == 0 || device >= session.objects().devices().size())
    return served.close(makeCleared<R, Member>(session, served));
  std::optional<Taken> taken(std::in_place, session.account(), device, bytes);
  if (taken->status() == CUDA_ERROR_OUT_OF_MEMORY && session.reclaimSpare())
    taken.emplace(session.account(), device, bytes);
  if (taken->status() != CUDA_SUCCESS) return served.close(taken->status());
  const CUresult status = makeCleared<R, Member>(session, served);
  if (status == CUDA_SUCCESS) {
    taken->keep();
    session.objectMemory().add(id, call.frame.context, device, bytes);
  }
  served.close(status);
}

template <class R, schema::Name Handle, auto Member>
void destroy(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  const uint64_t id = served.template get<Handle>().id();
  const CUresult status = served.invoke(session.driver().*Member);
  if (status == CUDA_SUCCESS) session.objectMemory().remove(id);
  served.close(status);
}

}  // namespace

void addArrayHandlers(HandlerTable& table) {
  table.add<ArrayCreate>(&create<ArrayCreate, &Driver::cuArrayCreate_v2>);
  table.add<Array3DCreate>(&create<Array3DCreate, &Driver::cuArray3DCreate_v2>);
  table.add<MipmapCreate>(&create<MipmapCreate, &Driver::cuMipmappedArrayCreate>);
  table.add<ArrayDestroy>(&destroy<ArrayDestroy, "hArray", &Driver::cuArrayDestroy>);
  table.add<MipmapDestroy>(&destroy<MipmapDestroy, "hMipmappedArray", &Driver::cuMipmappedArrayDestroy>);
}

}  // namespace gpupool::server

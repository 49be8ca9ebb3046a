// Contexts: the client keeps the stacks; here a context only exists.
#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using CtxCreate = GPUPOOL_ROW(cuCtxCreate_v2);
using CtxDestroy = GPUPOOL_ROW(cuCtxDestroy_v2);
using PrimaryRetain = GPUPOOL_ROW(cuDevicePrimaryCtxRetain);
using PrimaryReset = GPUPOOL_ROW(cuDevicePrimaryCtxReset_v2);
using PrimaryFlags = GPUPOOL_ROW(cuDevicePrimaryCtxSetFlags_v2);
using EnablePeer = GPUPOOL_ROW(cuCtxEnablePeerAccess);
using DisablePeer = GPUPOOL_ROW(cuCtxDisablePeerAccess);

unsigned deviceOf(Session& session, CUcontext context) {
  CUdevice device = 0;
  session.driver().cuCtxPushCurrent_v2(context);
  session.driver().cuCtxGetDevice(&device);
  session.driver().cuCtxPopCurrent_v2(&context);
  auto& devices = session.objects().devices();
  for (unsigned d = 0; d < devices.size(); ++d)
    if (devices[d] == device) return d;
  return ~0u;
}

void createContext(Session& session, Call& call) {
  Served<CtxCreate> served(session, call);
  if (!served.open()) return;
  PlaceGlobals place;
  CUresult status = served.invoke(session.driver().cuCtxCreate_v2);
  CUcontext made = nullptr;
  if (status == CUDA_SUCCESS) session.driver().cuCtxPopCurrent_v2(&made);
  if (made != nullptr) session.contextMade(made, deviceOf(session, made));
  served.close(status);
}

// Arrays of a primary context that is active no more are gone. Those of other contexts on the device go from
// the account with them: too little counted rather than too much, and rare.
void dropPrimaryMemory(Session& session) {
  const auto& devices = session.objects().devices();
  if (session.driver().cuDevicePrimaryCtxGetState == nullptr) return;
  session.objectMemory().removeWhere([&](uint64_t, unsigned device) {
    unsigned flags = 0;
    int active = 1;
    return session.driver().cuDevicePrimaryCtxGetState(devices[device], &flags, &active) == CUDA_SUCCESS &&
           active == 0;
  });
}

// The streams of a context that is about to end. Afterwards the driver takes their handles for pointers to
// what is no more, so nobody may ask it about them (a suspension asks about every stream).
std::vector<uint64_t> streamsOf(Session& session, CUcontext context) {
  std::vector<uint64_t> streams;
  const Driver& driver = session.driver();
  if (context == nullptr || driver.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return streams;
  session.objects().forEach(HandleKind::stream, [&](uint64_t id, uint64_t real) {
    CUcontext its = nullptr;
    if (driver.cuStreamGetCtx(reinterpret_cast<CUstream>(real), &its) == CUDA_SUCCESS && its == context)
      streams.push_back(id);
  });
  driver.cuCtxPopCurrent_v2(&context);
  return streams;
}

// The same of events and arrays, of which the driver does not say whose they are.
std::vector<uint64_t> recordedIn(Session& session, HandleKind kind, uint64_t context) {
  std::vector<uint64_t> made;
  for (const auto& [id, entry] : session.record().living(kind))
    if (entry.frame.context == context) made.push_back(id);
  return made;
}

// end: the driver's call, of which the context does not come back whatever it says.
template <class End>
void endContext(Session& session, const Call& call, CUcontext context, End&& end) {
  auto unasked = session.words().contextEnds(context);
  session.endSpare();
  session.space().contextEnds();
  const std::vector<uint64_t> streams = streamsOf(session, context);
  const uint64_t name = session.objects().known(context);
  end();
  for (const uint64_t id : streams) session.objects().retire(id);
  for (const HandleKind kind : {HandleKind::event, HandleKind::array, HandleKind::mipmap})
    for (const uint64_t id : recordedIn(session, kind, name)) {
      if (kind == HandleKind::event) session.sharedEvents().forget(id, [] { return false; });
      session.objects().retire(id);
    }
  session.eventTimes().contextEnded(name);
  session.contextEnded(context);
  if (call.status == CUDA_SUCCESS) session.record().endContext(name, {call.frame, call.bytes, {}, {}});
}

void destroyContext(Session& session, Call& call) {
  Served<CtxDestroy> served(session, call);
  if (!served.open()) return;
  endContext(session, call, served.get<"ctx">().value(),
             [&] { served.close(served.invoke(session.driver().cuCtxDestroy_v2)); });
}

void retainPrimary(Session& session, Call& call) {
  PlaceGlobals place;
  Served<PrimaryRetain> served(session, call);
  if (!served.open()) return;
  served.close(served.invoke(session.driver().cuDevicePrimaryCtxRetain));
  if (call.status != CUDA_SUCCESS) return;
  const CUcontext context = *served.get<"pctx">().pass();
  session.primaries()[served.get<"dev">().value()] = context;
  session.contextMade(context, deviceOf(session, context));
}

void resetPrimary(Session& session, Call& call) {
  Served<PrimaryReset> served(session, call);
  if (!served.open()) return;
  endContext(session, call, session.primaries()[served.get<"dev">().value()], [&] {
    endGreens(session, served.get<"dev">().value());
    served.close(served.invoke(session.driver().cuDevicePrimaryCtxReset_v2));
  });
  dropPrimaryMemory(session);
}

// Peer access is per device here: memory is mapped, not allocated by a context, and access is a property of
// the mapping.
void enablePeer(Session& session, Call& call) {
  Served<EnablePeer> served(session, call);
  if (!served.open()) return;
  CUresult status = served.invoke(session.driver().cuCtxEnablePeerAccess);
  if (status == CUDA_SUCCESS) {
    CUcontext current = nullptr;
    session.driver().cuCtxGetCurrent(&current);
    unsigned me = deviceOf(session, current);
    unsigned peer = deviceOf(session, served.get<"peerContext">().value());
    if (me != ~0u && peer != ~0u && me != peer) status = session.space().allowPeer(peer, me);
  }
  served.close(status);
}

}  // namespace

void addContextHandlers(HandlerTable& table) {
  table.add<CtxCreate>(&createContext);
  table.add<CtxDestroy>(&destroyContext);
  table.add<PrimaryRetain>(&retainPrimary);
  table.add<PrimaryReset>(&resetPrimary);
  table.add<PrimaryFlags>(&servePlacing<PrimaryFlags, &Driver::cuDevicePrimaryCtxSetFlags_v2>);
  table.add<EnablePeer>(&enablePeer);
  table.add<DisablePeer>(&servePlacing<DisablePeer, &Driver::cuCtxDisablePeerAccess>);
}

}  // namespace gpupool::server

// Device extents and pinned host memory at addresses the client chose; copies between the two, every address
// checked.
#include <cstring>

#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using ExtentMap = GPUPOOL_ROW(sessionExtentMap);
using ExtentUnmap = GPUPOOL_ROW(sessionExtentUnmap);
using PhysicalCreate = GPUPOOL_ROW(sessionPhysicalCreate);
using PhysicalMap = GPUPOOL_ROW(sessionPhysicalMap);
using PhysicalRelease = GPUPOOL_ROW(sessionPhysicalRelease);
using ExtentAccess = GPUPOOL_ROW(sessionExtentAccess);
using MemoryElsewhere = GPUPOOL_ROW(sessionMemoryElsewhere);
using PeerAccess = GPUPOOL_ROW(sessionPeerAccess);
using HostMap = GPUPOOL_ROW(sessionHostMap);
using HostShare = GPUPOOL_ROW(sessionHostShare);
using HostUnmap = GPUPOOL_ROW(sessionHostUnmap);
using MirrorApply = GPUPOOL_ROW(sessionMirrorApply);
using MirrorCollect = GPUPOOL_ROW(sessionMirrorCollect);

unsigned ordinalOf(Session& session, CUdevice device) {
  auto& devices = session.objects().devices();
  for (unsigned d = 0; d < devices.size(); ++d)
    if (devices[d] == device) return d;
  return ~0u;
}

void mapExtent(Session& session, Call& call) {
  Served<ExtentMap> served(session, call);
  if (!served.open()) return;
  unsigned device = ordinalOf(session, served.get<"device">().value());
  served.close(
      session.space().mapExtent(device, served.get<"address">().value(), served.get<"bytes">().value()));
}

void unmapExtent(Session& session, Call& call) {
  Served<ExtentUnmap> served(session, call);
  if (served.open()) served.close(session.space().unmapExtent(served.get<"address">().value()));
}

void createPhysical(Session& session, Call& call) {
  Served<PhysicalCreate> served(session, call);
  if (!served.open()) return;
  unsigned device = ordinalOf(session, served.get<"device">().value());
  served.close(
      session.space().createPhysical(device, served.get<"name">().value(), served.get<"bytes">().value()));
}

void mapPhysical(Session& session, Call& call) {
  Served<PhysicalMap> served(session, call);
  if (served.open())
    served.close(session.space().mapPhysical(served.get<"name">().value(), served.get<"address">().value()));
}

void releasePhysical(Session& session, Call& call) {
  Served<PhysicalRelease> served(session, call);
  if (served.open()) served.close(session.space().releasePhysical(served.get<"name">().value()));
}

void extentAccess(Session& session, Call& call) {
  Served<ExtentAccess> served(session, call);
  if (!served.open()) return;
  unsigned device = ordinalOf(session, served.get<"device">().value());
  served.close(session.space().setAccess(served.get<"address">().value(), device,
                                         static_cast<CUmemAccess_flags>(served.get<"flags">().value())));
}

void memoryElsewhere(Session& session, Call& call) {
  Served<MemoryElsewhere> served(session, call);
  if (!served.open()) return;
  const unsigned device = ordinalOf(session, served.get<"device">().value());
  served.get<"bytes">().plain() = session.account().others(device) + session.objectMemory().bytes(device);
  served.close(CUDA_SUCCESS);
}

void peerAccess(Session& session, Call& call) {
  Served<PeerAccess> served(session, call);
  if (!served.open()) return;
  CUdevice owner = served.get<"owner">().value(), peer = served.get<"peer">().value();
  int can = 0;
  CUresult status = session.driver().cuDeviceCanAccessPeer(&can, peer, owner);
  if (status == CUDA_SUCCESS && can == 0) status = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  if (status == CUDA_SUCCESS)
    status = session.space().allowPeer(ordinalOf(session, owner), ordinalOf(session, peer));
  served.close(status);
}

void mapHost(Session& session, Call& call) {
  Served<HostMap> served(session, call);
  if (!served.open()) return;
  const uint64_t address = served.get<"address">().value(), bytes = served.get<"bytes">().value();
  std::shared_ptr<transport::SharedMemory> memory;
  CUresult status = CUDA_ERROR_OUT_OF_MEMORY;
  if (session.awaitReleased(address, bytes))
    status = session.space().mapHost(address, bytes, served.get<"flags">().value(), memory);
  if (status == CUDA_SUCCESS) {
    transport::Region region = session.share(memory);
    served.get<"region">().plain() = {region.id, region.generation};
    session.keepRegion(address, region);
  }
  served.close(status);
}

void shareHost(Session& session, Call& call) {
  Served<HostShare> served(session, call);
  if (!served.open()) return;
  const uint64_t address = served.get<"address">().value();
  const schema::RegionName region = served.get<"region">().value();
  served.close(session.shareHost(address, {region.id, region.generation}));
}

void unmapHost(Session& session, Call& call) {
  Served<HostUnmap> served(session, call);
  if (!served.open()) return;
  session.dropRegion(served.get<"address">().value());
  served.close(session.space().unmapHost(served.get<"address">().value()));
}

// ---- mirrors: runs are {u64 offset, u64 length, bytes padded to 8} ----

// Aside calls. `piece` stays, and with the lock modules do, whatever is unmapped or unloaded meanwhile.

// Pages that only the device touches.
bool isOfFile(const std::shared_ptr<transport::SharedMemory>& piece) {
  return piece != nullptr && piece->isOfFile();
}

void applyMirror(Session& session, Call& call) {
  Served<MirrorApply> served(session, call);
  if (!served.open()) return;
  uint64_t address = served.get<"address">().value();
  auto& runs = served.get<"runs">().array();
  Reader in(std::as_bytes(std::span(runs)));
  // One piece of memory holds all from the mirror's beginning to the run: so far reaches its base.
  auto lock = session.holdMirrors();
  const auto piece = session.space().hostMemory(address, 1);
  const bool may = session.space().ownsHost(address, 1) && !isOfFile(piece);
  CUresult status = may ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  while (in.remaining() > 0 && status == CUDA_SUCCESS) {
    uint64_t offset = in.value<uint64_t>();
    auto bytes = in.blob();
    if (in.bad() || offset > SIZE_MAX - bytes.size() ||
        !session.space().ownsHost(address, offset + bytes.size())) {
      status = CUDA_ERROR_INVALID_VALUE;
      break;
    }
    std::memcpy(reinterpret_cast<void*>(address + offset), bytes.data(), bytes.size());
    session.mirror(address).apply(offset, bytes);
  }
  served.close(status);
}

void collectMirror(Session& session, Call& call) {
  Served<MirrorCollect> served(session, call);
  if (!served.open()) return;
  uint64_t address = served.get<"address">().value();
  size_t length = served.get<"length">().value();
  auto& out = served.get<"runs">().array();
  size_t& bytes = served.get<"bytes">().plain();
  auto lock = session.holdMirrors();
  const auto piece = session.space().hostMemory(address, length);
  if (!session.space().ownsHost(address, length) || isOfFile(piece))
    return served.close(CUDA_ERROR_INVALID_VALUE);
  // Whole words: runs are padded to them.
  std::span<unsigned char> room(out.data(), out.size() & ~size_t{7});
  bytes = session.mirror(address).collect(reinterpret_cast<const std::byte*>(address), length, room);
  session.mirrorAsked(served.get<"set">().value(), address, length);
  served.close(CUDA_SUCCESS);
}

}  // namespace

void addMemoryHandlers(HandlerTable& table) {
  table.add<ExtentMap>(&mapExtent);
  table.add<ExtentUnmap>(&unmapExtent);
  table.add<PhysicalCreate>(&createPhysical);
  table.add<PhysicalMap>(&mapPhysical);
  table.add<PhysicalRelease>(&releasePhysical);
  table.add<ExtentAccess>(&extentAccess);
  table.add<MemoryElsewhere>(&memoryElsewhere);
  table.add<PeerAccess>(&peerAccess);
  table.add<HostMap>(&mapHost);
  table.add<HostShare>(&shareHost);
  table.add<HostUnmap>(&unmapHost);
  table.add<MirrorApply>(&applyMirror);
  table.add<MirrorCollect>(&collectMirror);
}

}  // namespace gpupool::server

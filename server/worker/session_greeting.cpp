// How a session begins: the hellos of client and worker.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "schema/lease_memory.h"
#include "schema/rows.h"
#include "server/worker/session.h"
#include "server/worker/session_wire.h"
#include "server/worker_process.h"

namespace gpupool::server {

using transport::Channel;

static_assert(schema::kMostLeasedDevices == schema::kMaxDevices);

namespace {

constexpr auto kLentBound = std::chrono::seconds(2);  // its name is announced ahead of the message

void describe(const Driver& driver, const std::vector<CUdevice>& devices, const std::vector<uint64_t>& limits,
              schema::WorkerHello& hello) {
  hello.deviceCount = static_cast<uint32_t>(devices.size());
  for (size_t d = 0; d < devices.size(); ++d) {
    schema::DeviceProperties& properties = hello.devices[d];
    CUdevice device = devices[d];
    driver.cuDeviceGetName(properties.name, sizeof properties.name, device);
    (driver.cuDeviceGetUuid_v2 ? driver.cuDeviceGetUuid_v2 : driver.cuDeviceGetUuid)(&properties.uuid,
                                                                                     device);
    properties.luidStatus = driver.cuDeviceGetLuid
                                ? driver.cuDeviceGetLuid(properties.luid, &properties.luidMask, device)
                                : CUDA_ERROR_NOT_SUPPORTED;
    driver.cuDeviceGetPCIBusId(properties.pciBusId, sizeof properties.pciBusId, device);
    size_t total = 0;
    driver.cuDeviceTotalMem_v2(&total, device);
    properties.totalBytes = total;
    properties.limitBytes = std::min<uint64_t>(limits[d], total);
    for (int a = 1; a < schema::kDeviceAttributes; ++a)
      properties.attributeKnown[a] =
          driver.cuDeviceGetAttribute(&properties.attributes[a], static_cast<CUdevice_attribute>(a),
                                      device) == CUDA_SUCCESS;
    for (size_t other = 0; other < devices.size(); ++other) {
      if (other == d) continue;
      driver.cuDeviceCanAccessPeer(&properties.canAccessPeer[other], device, devices[other]);
      for (int a = 1; a < schema::kP2PAttributes; ++a)
        if (driver.cuDeviceGetP2PAttribute)
          driver.cuDeviceGetP2PAttribute(&properties.p2p[other][a], static_cast<CUdevice_P2PAttribute>(a),
                                         device, devices[other]);
    }
  }
}

}  // namespace

// Why this greeting is refused; empty: it is not.
std::string Session::judgeGreeting(std::span<const std::byte> message, schema::ClientHello& client) const {
  if (message.size() != sizeof client) return "the client's greeting is not gpupool's";
  std::memcpy(&client, message.data(), sizeof client);
  if (client.magic != schema::kClientMagic) return "the client's greeting is not gpupool's";
  if (client.protocol != schema::kProtocolVersion || client.rowsHash != schema::rowsHash())
    return "version mismatch: client speaks protocol " + std::to_string(client.protocol) + ", worker " +
           std::to_string(schema::kProtocolVersion) +
           ", or their call rows differ; install the same gpupool on both";
  if (client.epoch != start_.epoch) return "the client's epoch is not the session's";
  if (client.contextAhead >= schema::kContextAheadOf + objects_.devices().size())
    return "the client's greeting is not gpupool's";
  return "";
}

// Of a session that begins anew. Empty, or why there is no such context.
std::string Session::makeContextAhead(uint32_t told) {
  if (told == schema::kContextAheadUnknown || told == schema::kNoContextAhead + contextAhead_) return "";
  if (contextAhead_ != 0) return "the worker's first context is not the session's";
  const size_t device = told - schema::kContextAheadOf;
  try {
    views_.contextAhead(server::contextAhead(driver_, start_.ordinal(device)));
  } catch (const std::exception& e) {
    return std::string("the session's first context cannot be made again: ") + e.what();
  }
  adoptContextAhead();
  return "";
}

// What a client needs to know that is let in.
void Session::fillGreeting(schema::WorkerHello& hello) {
  space_.addStaging(views_.staging());
  auto name = [](transport::Region region) { return schema::RegionName{region.id, region.generation}; };
  hello.words = name(connection_->share(words_.memory()));
  hello.staging = name(connection_->share(views_.staging()));
  hello.stagingAddress = reinterpret_cast<uint64_t>(views_.staging()->data());
  hello.stagingBytes = views_.staging()->size();
  driver_.cuDriverGetVersion(&hello.driverVersion);
  hello.softwareDriver = driver_.software();
  hello.contextAhead = schema::kNoContextAhead + contextAhead_;
  const Numbers served = numbers();
  hello.lastFrame = served.lastFrame;
  hello.lastAside = served.lastAside;
  describe(driver_, objects_.devices(), limits(start_), hello);
}

bool Session::greet(std::string& reason) {
  std::span<const std::byte> message;
  while (message.empty() && waitsFor(*connection_, stopping_))
    message = connection_->receive(Channel::call, soon(kTick));
  schema::ClientHello client;
  auto hello = std::make_unique<schema::WorkerHello>();
  hello->protocol = schema::kProtocolVersion;
  hello->rowsHash = schema::rowsHash();
  hello->epoch = start_.epoch;
  CUresult refusal = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
  if (message.empty()) {
    reason = stopping_ ? endReason() : "the client sent no greeting";
    refusal = CUDA_ERROR_DEVICE_UNAVAILABLE;
  } else {
    reason = judgeGreeting(message, client);
  }
  if (reason.empty()) {
    const int has = space_.reserved();  // of a session that was rebuilt
    if (start_.rebuild && has < 0) reason = makeContextAhead(client.contextAhead);
    if (!reason.empty()) refusal = CUDA_ERROR_DEVICE_UNAVAILABLE;
    const int space = has >= 0 ? has : space_.reserve(client.spaces, reason);
    if (has >= 0 && client.spaces != 1u << has) reason = "the client's address space is not the session's";
    if (space >= 0) hello->space = static_cast<uint32_t>(space);
    if (space < 0) refusal = CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (reason.empty()) {
    fillGreeting(*hello);
  } else {
    hello->status = refusal;
    std::snprintf(hello->text, sizeof hello->text, "%s", reason.c_str());
  }
  std::byte* out = reserveFor(*connection_, stopping_, Channel::call, sizeof *hello);
  if (out == nullptr) {
    if (reason.empty()) reason = "the client went away while greeting: " + connection_->reason();
    return false;
  }
  std::memcpy(out, hello.get(), sizeof *hello);
  connection_->commit(Channel::call, sizeof *hello);
  if (!reason.empty() || !start_.rebuild) return reason.empty();
  if (!nameHostRegions())
    reason = "the client went away while greeting, or its pinned memory is in too many pieces";
  if (reason.empty() && client.lends != 0) reason = takeLent();
  return reason.empty();
}

// All of it, or the session stays where it was.
std::string Session::takeLent() {
  if (!mapsMemory()) return "the client lends memory over a network";
  std::span<const std::byte> message;
  while (message.empty() && waitsFor(*connection_, stopping_))
    message = connection_->receive(Channel::call, soon(kTick));
  const auto pieces = space_.hostPieces();
  if (message.size() != std::max<size_t>(pieces.size(), 1) * sizeof(schema::MovedRegion))
    return "the client does not lend all of its pinned memory";
  CUcontext current = nullptr;
  driver_.cuCtxGetCurrent(&current);
  std::string why;
  for (auto piece = pieces.begin(); piece != pieces.end() && why.empty(); ++piece) {
    schema::MovedRegion lent;
    std::memcpy(&lent, message.data(), sizeof lent);
    message = message.subspan(sizeof lent);
    if (lent.address != piece->first) return "the client lends pinned memory that is not the session's";
    const auto pages = connection_->map({lent.region.id, lent.region.generation}, nullptr, soon(kLentBound));
    why = pages == nullptr ? "the client's pinned memory cannot be mapped"
                           : space_.exchangeHost(piece->first, *pages);
  }
  if (current != nullptr) driver_.cuCtxSetCurrent(current);
  if (!why.empty()) return why;
  std::unique_lock lock(regionsMutex_);
  const auto kept = std::exchange(regions_, {});
  lock.unlock();
  for (const auto& [address, region] : kept) connection_->unshare(region);
  return nameHostRegions() ? "" : "the client went away while greeting";
}

}  // namespace gpupool::server

#include "server/front/worker_starts.h"

#include <capnp/message.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/hmac.h"
#include "base/log.h"
#include "schema/convert.h"

namespace gpupool::server {
namespace {

constexpr size_t kKeyBytes = 32;

// Servers of one cache have one key. Empty: there is none, and the log says why.
std::string keyOf(const std::string& moduleCache) {
  const std::string path = moduleCache + ".key", made = path + "." + std::to_string(getpid());
  char key[kKeyBytes];
  if (access(path.c_str(), F_OK) != 0) {
    randomBytes(std::as_writable_bytes(std::span(key)));
    const kj::AutoCloseFd file(open(made.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (file.get() >= 0 && ::write(file, key, sizeof key) == ssize_t{sizeof key})
      static_cast<void>(link(made.c_str(), path.c_str()) == 0);  // whole, and another server's stays
    unlink(made.c_str());
  }
  const kj::AutoCloseFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (file.get() >= 0 && ::read(file, key, sizeof key) == ssize_t{sizeof key}) return {key, sizeof key};
  GPUPOOL_WARNING("no module cache: its key %s: %s", path.c_str(),
                  file.get() >= 0 ? "too short" : strerror(errno));
  return "";
}

}  // namespace

WorkerStarts::WorkerStarts(LeaseTable& leases, Settings settings)
    : leases_(leases), settings_(std::move(settings)), doors_(settings_.doors) {
  if (!settings_.moduleCache.empty()) cacheKey_ = keyOf(settings_.moduleCache);
  if (cacheKey_.empty()) settings_.moduleCache.clear();
}

bool WorkerStarts::send(WorkerChild& worker, const SessionFacts& facts, const Grant& grant, int socket,
                        From from) const {
  const Placement* placement = grant.placement(facts.deviceEpoch);
  KJ_REQUIRE(placement != nullptr, "the lease has no such devices any more");
  capnp::MallocMessageBuilder message;
  auto start = message.initRoot<schema::WorkerOrder>().initStart();
  fill(facts, *placement, start);
  start.setRebuild(from != From::client);
  start.setStream(from == From::stream || from == From::server);
  start.setFiles(from == From::server);
  start.setReportActivity(settings_.reportActivity || grant.protectMs != 0 || grant.idleMs != 0);
  start.setProtected(grant.protectMs != 0);
  start.setHolderKeeps(grant.holderKeeps);
  const kj::AutoCloseFd cache = cacheFolder(grant.tenant), door = doorFor(worker, grant);
  if (door.get() >= 0) start.setAwayMs(static_cast<uint32_t>(settings_.away.count()));
  return worker.send(message, describeDescriptors(start, *placement, socket, cache, door));
}

kj::AutoCloseFd WorkerStarts::doorFor(WorkerChild& worker, const Grant& grant) const {
  if (settings_.away.count() == 0 || !LeaseTable::outlives(grant)) return nullptr;
  auto door = doors_.make(worker.pid());
  if (door.get() >= 0) worker.outlive(doors_.nameOf(worker.pid()));
  return door;
}

void WorkerStarts::fill(const SessionFacts& facts, const Placement& placement,
                        schema::WorkerStart::Builder start) const {
  schema::write(facts.session, start.initSession());
  start.setEpoch(facts.epoch);
  start.setTransport(facts.transport);
  auto list = start.initDevices(static_cast<unsigned>(placement.devices.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    const auto& [index, memoryBytes] = placement.devices[i];
    schema::write(LeasedDevice{leases_.devices()[index], memoryBytes}, list[i]);
  }
  start.setNetworkDevice(settings_.networkDevice);
  start.setNetworkWire(settings_.networkWire);
  start.setModuleCacheBytes(settings_.moduleCacheBytes);
  start.setClientPid(facts.clientPid);
}

std::vector<int> WorkerStarts::describeDescriptors(schema::WorkerStart::Builder start,
                                                   const Placement& placement, int socket, int cache,
                                                   int door) const {
  std::vector<std::pair<schema::Descriptor, int>> list{
      {start.getRebuild() ? schema::Descriptor::STATE : schema::Descriptor::CLIENT_SOCKET, socket}};
  if (cache >= 0) list.emplace_back(schema::Descriptor::MODULE_CACHE, cache);
  for (const auto& device : placement.devices)
    if (const int lock = settings_.deviceLock(device.index); lock >= 0)
      list.emplace_back(schema::Descriptor::DEVICE_LOCK, lock);
  if (door >= 0) list.emplace_back(schema::Descriptor::DOOR, door);
  auto kinds = start.initDescriptors(static_cast<unsigned>(list.size()));
  std::vector<int> descriptors;
  for (const auto& [kind, descriptor] : list) {
    kinds.set(static_cast<unsigned>(descriptors.size()), kind);
    descriptors.push_back(descriptor);
  }
  return descriptors;
}

// Code is never shared between tenants; their names come from outside, so the folder's is a digest. A worker
// may open files below the cache's folder and not list it, so it must not be able to guess: the digest is
// keyed.
std::string WorkerStarts::folderOf(const std::string& tenant) const {
  const Digest digest = hmacSha256(std::as_bytes(std::span(cacheKey_)), std::as_bytes(std::span(tenant)));
  std::string hex;
  for (size_t i = 0; i < 16; ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(digest[i]));
    hex += two;
  }
  return settings_.moduleCache + "/" + hex;
}

kj::AutoCloseFd WorkerStarts::cacheFolder(const std::string& tenant) const {
  if (settings_.moduleCache.empty()) return nullptr;
  const std::string folder = folderOf(tenant);
  int opened = -1;
  if (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST)
    opened = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (opened >= 0 && settings_.workersGroup &&
      (fchown(opened, static_cast<uid_t>(-1), *settings_.workersGroup) != 0 || fchmod(opened, 0770) != 0)) {
    const int error = errno;
    close(std::exchange(opened, -1));
    errno = error;
  }
  if (opened < 0)
    GPUPOOL_WARNING("module cache %s: %s; the session runs without it", folder.c_str(), strerror(errno));
  return kj::AutoCloseFd(opened);
}

}  // namespace gpupool::server

// WorkerProcess's part when its server dies: the session goes on without one for a while, and under the
// server's next life if that comes.
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/descriptor_passing.h"
#include "base/log.h"
#include "schema/convert.h"
#include "schema/worker.capnp.h"
#include "server/worker_process.h"

namespace gpupool::server {
namespace {

constexpr size_t kMostOrder = 4096;  // bytes of what comes to a door

}  // namespace

std::string WorkerProcess::beginAway() {
  if (door_ < 0) return kServerDiedText;
  std::string why = orders_.stays ? orders_.stays() : "";
  {
    std::lock_guard lock(memoryMutex_);
    if (withoutReceipt_) why = "it shares memory or events with other processes";
  }
  if (!why.empty()) return std::string(kServerDiedText) + ", and its session does not outlive it: " + why;
  GPUPOOL_WARNING("the server died; the session goes on, and waits for the next one for %lld ms",
                  static_cast<long long>(awayBound_.count()));
  awayUntil_ = std::chrono::steady_clock::now() + awayBound_;
  outlives_ = true;
  std::lock_guard lock(memoryMutex_);
  away_ = true;
  return "";
}

int WorkerProcess::awayLeft() const {
  if (!away_) return -1;
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(awayUntil_ - std::chrono::steady_clock::now());
  return static_cast<int>(std::max<int64_t>(left.count(), 0));
}

std::string WorkerProcess::endAway() const {
  return std::string(kServerDiedText) + ", and was not started again within " +
         std::to_string(awayBound_.count()) + " ms";
}

// Anybody may have sent it who may use the server's folder, and nobody else: the server's user.
void WorkerProcess::hearDoor() {
  std::array<capnp::word, kMostOrder / sizeof(capnp::word)> room{};
  const auto received =
      receiveWithDescriptors(door_, std::as_writable_bytes(std::span(room)), MSG_DONTWAIT | MSG_TRUNC);
  bool taken = false;
  if (received.whole && received.bytes > 0 && static_cast<size_t>(received.bytes) <= sizeof room &&
      received.descriptors.size() == 1 && isControlSocket(received.descriptors[0])) {
    try {
      const auto words = kj::arrayPtr(room.data(), static_cast<size_t>(received.bytes) / sizeof(capnp::word));
      capnp::FlatArrayMessageReader reader(words);
      const auto order = reader.getRoot<schema::WorkerOrder>();
      const int socket = received.descriptors[0];
      if (order.isReadopt() && schema::read(order.getReadopt().getSession()) == session_ &&
          order.getReadopt().getEpoch() == epoch_)
        taken = order.getReadopt().getHeld() ? leaveForFiles(socket)
                                             : (order.getReadopt().getShares() || !shares()) &&
                                                   comeBack(socket, order.getReadopt().getWaits());
    } catch (const kj::Exception&) {
      taken = false;
    }
    if (!taken) GPUPOOL_WARNING("what came to the door is no server of this session");
  }
  if (taken) return;
  for (const int one : received.descriptors) close(one);
}

// Takes the socket, if that is a server's. What is the session's then is said and kept at one moment: who
// waits for memory asks the new server.
bool WorkerProcess::comeBack(int socket, bool takesOneThatWaits) {
  bool changing = false;
  {
    std::lock_guard lock(memoryMutex_);
    if (clientKept_ < 0 && !takesOneThatWaits) return false;
    untold_ = sharesAgain();  // and nothing of what the server that has died kept
    if (!sendReadopted(socket, changing)) return false;
    owed_.clear();  // it was not said to be the session's
    std::erase_if(asked_, [](const auto& one) { return one.second.abandoned; });
    std::erase_if(shareAsked_, [](const auto& one) { return one.second.abandoned; });
    follow(socket);
    tellShares();
  }
  answered_.notify_all();
  GPUPOOL_INFO("the session goes on under the server's next life");
  if (orders_.decided) orders_.decided(false);
  repeatReports(changing);
  return true;
}

// Likewise. That server has nothing of the session, and is followed for its end alone: the life after it asks
// again.
bool WorkerProcess::leaveForFiles(int socket) {
  if (!orders_.decided || !orders_.decided(true)) return false;
  {
    std::lock_guard lock(memoryMutex_);
    follow(socket);
  }
  answered_.notify_all();
  GPUPOOL_INFO("the session is held in files");
  return true;
}

void WorkerProcess::follow(int socket) {
  away_ = false;
  ++generation_;
  std::lock_guard control(controlMutex_);
  control_ = std::make_shared<const Control>(socket);
}

// Under memoryMutex_.
bool WorkerProcess::sendReadopted(int socket, bool& changing) const {
  capnp::MallocMessageBuilder message;
  auto report = message.initRoot<schema::WorkerReport>();
  report.setRowsHash(rowsHash_);
  auto readopted = report.initReadopted();
  auto taken = readopted.initTaken(static_cast<unsigned>(devices_));
  for (unsigned place = 0; place < taken.size(); ++place) {
    const auto found = taken_.find(place);
    taken.set(place, found == taken_.end() ? 0 : found->second);
  }
  readopted.setShares(static_cast<uint32_t>(untold_.size()));
  auto counts = readopted.initCounts();
  {
    std::lock_guard lock(saidMutex_);
    counts.setCalls(saidCounts_.calls);
    counts.setAwaited(saidCounts_.awaited);
    counts.setToDeviceBytes(saidCounts_.toDeviceBytes);
    counts.setFromDeviceBytes(saidCounts_.fromDeviceBytes);
    changing = changes_ != 0;
    readopted.setChanging(changing);
    if (!changing && saidSuspended_.suspended) writeOutcome(saidSuspended_, readopted.initSuspended());
  }
  std::vector<int> descriptors = deviceLocks_;
  readopted.setWaits(clientKept_ < 0);
  if (clientKept_ >= 0) descriptors.insert(descriptors.begin(), clientKept_);
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  return sendWithDescriptors(socket, std::as_bytes(std::span(bytes.begin(), bytes.size())), descriptors,
                             MSG_DONTWAIT) >= 0;
}

// What is told when it changes only. What has come of an order meanwhile may have gone to the server that is
// no more; told twice, it is passed over.
void WorkerProcess::repeatReports(bool changing) {
  std::unique_lock lock(saidMutex_);
  const auto activity = saidActivity_;
  const auto hindrances = saidHindrances_;
  const auto log = saidLog_;
  const auto lost = saidLost_;
  const auto suspended = saidSuspended_;
  const bool changed = changing && changes_ == 0;
  lock.unlock();
  if (changed) sendSuspended(suspended);
  if (activity) reportActivity(*activity);
  if (!hindrances.empty()) reportHindrances(hindrances);
  if (log) reportLog(*log);
  for (const auto& [ordinal, error] : lost) reportLost(ordinal, error);
}

}  // namespace gpupool::server

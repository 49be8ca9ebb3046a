#include "server/front/readoption.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <kj/debug.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "base/descriptor_passing.h"
#include "base/log.h"
#include "schema/convert.h"
#include "schema/handshake.h"
#include "server/worker_process.h"

namespace gpupool::server {
namespace {

const char kNonsense[] = "it answers nonsense";

void refuse(const std::string& why) {
  kj::throwFatalException(kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(why)));
}

// Its amounts are for who knows the devices.
Outcome readState(schema::SuspendReport::Reader report) {
  Outcome state;
  state.suspended = report.getSuspended();
  for (const uint64_t kept : report.getKept()) state.facts.kept.push_back(kept);
  state.facts.movedBytes = report.getMovedBytes();
  return state;
}

}  // namespace

struct Readoption::Answer {
  kj::AutoCloseFd socket;
  uint64_t rowsHash = 0;
  std::vector<uint64_t> taken;
  SessionCounts counts;
  uint32_t shares = 0;
  bool changing = false, waits = false;
  Outcome state;  // unless it is changing
  kj::AutoCloseFd client;
  std::vector<kj::AutoCloseFd> locks;
};

Readoption::Readoption(kj::UnixEventPort& port, kj::Timer& timer, LeaseTable& leases, SessionTable& sessions,
                       DeviceClaims& claims, Doors doors, Settings settings)
    : port_(port),
      timer_(timer),
      leases_(leases),
      sessions_(sessions),
      claims_(claims),
      doors_(std::move(doors)),
      settings_(settings),
      tasks_(*this) {}

kj::Promise<void> Readoption::run(const std::vector<StoredGrant>& leases, std::set<Id> held,
                                  std::vector<uint64_t> sessions) {
  held_ = std::move(held);
  const auto workers = claims_.spared();
  adoptLeases(leases, workers);
  std::set<pid_t> known;
  if (settings_.copier) known.insert(*settings_.copier);
  kj::Vector<kj::Promise<void>> asked;
  for (const StoredWorker& worker : workers) {
    known.insert(worker.pid);
    if (held_.contains(worker.lease))
      sendAway(worker);
    else
      asked.add(adopt(worker));
  }
  doors_.sweep(known);
  return kj::joinPromises(asked.releaseAsArray())
      .then([this] { return sessions_.restoreShares(settings_.bound); })
      .then([this, sessions = std::move(sessions)] { tellEnded(sessions); });
}

// Of one whose worker has not come back and is not gone either, when it is: until then its streams may write.
void Readoption::tellEnded(const std::vector<uint64_t>& sessions) {
  const auto survivors = claims_.earlier();
  for (const uint64_t number : sessions) {
    if (number == 0 || sessions_.hasNumber(number)) continue;
    const auto survivor =
        std::ranges::find_if(survivors, [&](const StoredWorker& worker) { return worker.number == number; });
    if (survivor == survivors.end())
      sessions_.endedEarlier(number);
    else
      tasks_.add(claims_.gone(survivor->lease).then([this, number] { sessions_.endedEarlier(number); }));
  }
}

void Readoption::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("readoption: %s", exception.getDescription().cStr());
}

void Readoption::adoptLeases(const std::vector<StoredGrant>& leases,
                             const std::vector<StoredWorker>& workers) {
  for (const StoredGrant& lease : leases) {
    if (held_.contains(lease.id)) continue;
    std::map<Id, uint64_t> epochs;
    for (const StoredWorker& worker : workers)
      if (worker.lease == lease.id) {
        uint64_t& epoch = epochs.try_emplace(worker.session->id, worker.session->epoch).first->second;
        epoch = std::min(epoch, worker.session->epoch);  // it may have been moving: take() says who has it
      }
    const auto why = lease.key.size() == schema::kSessionKeyBytes
                         ? leases_.readopt(lease, std::move(epochs))
                         : std::optional<std::string>("its key is damaged");
    if (why)
      GPUPOOL_WARNING("lease %s of this server's earlier life ends: %s", lease.id.text().c_str(),
                      why->c_str());
    else
      GPUPOOL_INFO("lease %s of this server's earlier life goes on", lease.id.text().c_str());
  }
}

kj::Promise<void> Readoption::adopt(StoredWorker worker) {
  const pid_t pid = worker.pid;
  return kj::evalNow([&]() -> kj::Promise<void> {
           Grant* lease = leases_.admissible(worker.lease);
           if (lease == nullptr || lease->placement(worker.session->deviceEpoch) == nullptr)
             refuse("its lease has ended, or was going elsewhere");
           kj::AutoCloseFd ours = knock(worker, false);
           auto observer = kj::heap<kj::UnixEventPort::FdObserver>(
               port_, ours, kj::UnixEventPort::FdObserver::OBSERVE_READ);
           return timer_.timeoutAfter(settings_.bound, hear(kj::mv(observer), kj::mv(ours)))
               .then([this, worker](kj::Own<Answer> answer) { take(worker, *answer); });
         })
      .catch_([this, pid](kj::Exception&& error) {
        const bool late = error.getType() == kj::Exception::Type::OVERLOADED;
        refused(pid, late ? "it does not answer" : error.getDescription().cStr());
      });
}

void Readoption::refused(pid_t worker, const char* why) {
  GPUPOOL_WARNING("worker %d of this server's earlier life is not readopted: %s", worker, why);
  {
    const auto door = doors_.nameOf(worker);
  }  // nobody knocks there again
  claims_.end(worker);
}

kj::AutoCloseFd Readoption::knock(const StoredWorker& worker, bool held) const {
  int ends[2];
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
  kj::AutoCloseFd ours(ends[0]);
  const kj::AutoCloseFd theirs(ends[1]);
  capnp::MallocMessageBuilder message;
  auto order = message.initRoot<schema::WorkerOrder>().initReadopt();
  schema::write(worker.session->id, order.initSession());
  order.setEpoch(worker.session->epoch);
  order.setShares(true);
  order.setHeld(held);
  order.setWaits(true);
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  if (const int error =
          doors_.knock(worker.pid, std::as_bytes(std::span(bytes.begin(), bytes.size())), theirs))
    refuse(std::string("its door: ") + strerror(error));
  return ours;
}

// Nobody waits for it but who wants its device, or the lease to be restored.
void Readoption::sendAway(const StoredWorker& worker) {
  const pid_t pid = worker.pid;
  tasks_.add(
      kj::evalNow([&]() -> kj::Promise<void> {
        kj::AutoCloseFd ours = knock(worker, true);
        auto observer =
            kj::heap<kj::UnixEventPort::FdObserver>(port_, ours, kj::UnixEventPort::FdObserver::OBSERVE_READ);
        return timer_.timeoutAfter(settings_.leaves, hearEnd(kj::mv(observer), kj::mv(ours)));
      })
          .then([] { return std::string("its lease is held in files"); },
                [](kj::Exception&& error) {
                  const bool late = error.getType() == kj::Exception::Type::OVERLOADED;
                  return std::string(late ? "its lease is held in files, and its client does not go there"
                                          : error.getDescription().cStr());
                })
          .then([this, pid](const std::string& why) { refused(pid, why.c_str()); }));
}

// It has closed its end. What it says before concerns no session of this life; but one of an earlier build,
// which goes on, says so.
kj::Promise<void> Readoption::hearEnd(kj::Own<kj::UnixEventPort::FdObserver> observer, kj::AutoCloseFd ours) {
  constexpr int kMostAtOnce = 16;  // of one that never stops talking
  auto room = kj::heapArray<capnp::word>(kMaxDatagram / sizeof(capnp::word));
  for (int heard = 0;; ++heard) {
    if (heard == kMostAtOnce)
      return kj::evalLast([this, ours = kj::mv(ours), observer = kj::mv(observer)]() mutable {
        return hearEnd(kj::mv(observer), kj::mv(ours));
      });
    const auto received = receiveWithDescriptors(
        ours, std::as_writable_bytes(std::span(room.begin(), room.size())), MSG_DONTWAIT | MSG_TRUNC);
    const bool nothing = received.bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    for (const int one : received.descriptors) close(one);
    if (nothing) break;
    if (received.bytes <= 0 || !received.whole) return kj::READY_NOW;
    capnp::FlatArrayMessageReader reader(
        kj::arrayPtr(room.begin(), static_cast<size_t>(received.bytes) / sizeof(capnp::word)));
    const auto said = reader.getRoot<schema::WorkerReport>();
    if (said.isReadopted() || said.isEnded()) return kj::READY_NOW;
    if (said.isMoved() && said.getMoved().getError().size() != 0) return kj::READY_NOW;  // it goes on here
  }
  auto ready = observer->whenBecomesReadable();
  // The observer goes before its descriptor.
  return ready.then([this, ours = kj::mv(ours), observer = kj::mv(observer)]() mutable {
    return hearEnd(kj::mv(observer), kj::mv(ours));
  });
}

// One that is not there any more, or does not take it, closes its end.
kj::Promise<kj::Own<Readoption::Answer>> Readoption::hear(kj::Own<kj::UnixEventPort::FdObserver> observer,
                                                          kj::AutoCloseFd ours) {
  auto ready = observer->whenBecomesReadable();
  return ready.attach(kj::mv(observer)).then([ours = kj::mv(ours)]() mutable {
    auto answer = kj::heap<Answer>();
    auto room = kj::heapArray<capnp::word>(kMaxDatagram / sizeof(capnp::word));
    const auto received = receiveWithDescriptors(
        ours, std::as_writable_bytes(std::span(room.begin(), room.size())), MSG_DONTWAIT | MSG_TRUNC);
    for (const int one : received.descriptors) answer->locks.emplace_back(one);
    if (received.bytes <= 0) refuse("its session has ended, or is another");
    if (!received.whole || static_cast<size_t>(received.bytes) > kMaxDatagram) refuse(kNonsense);
    capnp::FlatArrayMessageReader reader(
        kj::arrayPtr(room.begin(), static_cast<size_t>(received.bytes) / sizeof(capnp::word)));
    const auto report = reader.getRoot<schema::WorkerReport>();
    if (!report.isReadopted()) refuse(kNonsense);
    answer->rowsHash = report.getRowsHash();
    const auto readopted = report.getReadopted();
    answer->waits = readopted.getWaits();
    if (!answer->waits) {
      if (answer->locks.empty()) refuse(kNonsense);
      answer->client = kj::mv(answer->locks.front());
      answer->locks.erase(answer->locks.begin());
    }
    for (const uint64_t bytes : readopted.getTaken()) answer->taken.push_back(bytes);
    const auto counts = readopted.getCounts();
    answer->counts = {counts.getCalls(), counts.getAwaited(), counts.getToDeviceBytes(),
                      counts.getFromDeviceBytes()};
    answer->shares = readopted.getShares();
    if (answer->shares > 3 * Offers::kMostOffers) refuse(kNonsense);  // pieces, offers and openings
    answer->changing = readopted.getChanging();
    if (readopted.hasSuspended()) answer->state = readState(readopted.getSuspended());
    answer->socket = kj::mv(ours);
    return answer;
  });
}

// Anything may have happened to its lease meanwhile.
void Readoption::take(const StoredWorker& worker, Answer& answer) {
  Grant* lease = leases_.admissible(worker.lease);
  const Placement* placement = lease == nullptr ? nullptr : lease->placement(worker.session->deviceEpoch);
  if (placement == nullptr) refuse("its lease has ended");
  if (answer.taken.size() != placement->devices.size() || answer.rowsHash != worker.session->rowsHash ||
      (answer.state.suspended && answer.state.facts.kept.size() != placement->devices.size()))
    refuse(kNonsense);
  // Of the two workers between which a session moved one alone answers.
  if (sessions_.hasNumber(worker.number)) refuse("another worker has its session");
  // What it has there may be another lease's by now.
  if (lease->suspended && (answer.changing || !answer.state.suspended)) refuse("its lease is suspended");
  SessionFacts facts;
  facts.session = worker.session->id;
  facts.lease = worker.lease;
  facts.epoch = worker.session->epoch;
  facts.clientPid = worker.session->clientPid;
  facts.command = worker.session->command;
  facts.transport = worker.session->transport;
  facts.rowsHash = worker.session->rowsHash;
  facts.transportNamed = worker.session->transportNamed;
  facts.readopted = true;
  facts.place(*placement, leases_.devices());
  for (uint32_t place = 0; place < answer.taken.size(); ++place) {
    const uint64_t used = sessions_.used(facts.lease, facts.deviceEpoch, place);
    if (answer.taken[place] > facts.memoryLimits[place] - used) refuse("it has more memory than its lease");
  }
  auto readopted = claims_.readopt(worker.pid, kj::mv(answer.locks));
  KJ_IF_MAYBE (process, readopted) {
    const int again = fcntl(*process, F_DUPFD_CLOEXEC, 0);
    if (again < 0) {
      kill(worker.pid, SIGKILL);  // nobody watches it any more
      refuse("this server can have no more descriptors");
    }
    settings_.parent->adopt(worker.pid, kj::AutoCloseFd(again));
    auto child = kj::heap<WorkerChild>(
        port_, *settings_.parent, WorkerParent::Process{worker.pid, kj::mv(*process)}, kj::mv(answer.socket));
    child->outlive(doors_.nameOf(worker.pid));
    SessionTable::Earlier earlier{worker.number, answer.taken, answer.counts,
                                  answer.shares, std::nullopt, answer.waits};
    if (!answer.changing) earlier.state = answer.state;
    uint64_t& epoch = lease->sessionEpochs[facts.session];
    epoch = answer.waits ? facts.epoch - 1 : std::max(epoch, facts.epoch);
    sessions_.readopt(std::move(facts), kj::mv(child), kj::mv(answer.client), std::move(earlier));
    return;
  }
  refuse("it is gone");
}

}  // namespace gpupool::server

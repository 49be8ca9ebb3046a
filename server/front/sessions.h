#pragma once
// The running sessions: one worker each, from the hand-over of the client's socket until the process is gone.
//
// They share their lease's memory: the account is kept here, by lease, for all its workers together.
//
// If a worker ends without giving its client a reason, the server sends one. It keeps a descriptor of the
// client's socket for that.
//
// A session ends by itself (its worker reports why and exits), by order (`end`: the worker is asked to stop,
// and is killed after `stopBound`), or by a crash. A worker that reported the end but does not exit is killed
// after `exitBound`. The reason of every end is logged and the last kHistory are kept.
//
// What a worker is asked to do with its session beside that, to suspend it and to resume it, is passed on
// here; what that means for a lease is suspension.h's. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "schema/id.h"
#include "server/front/leases.h"
#include "server/front/memory_account.h"
#include "server/front/server_state.h"
#include "server/front/worker_child.h"

namespace gpupool::server {

struct SessionFacts {
  Id session, lease;
  uint64_t epoch = 0;
  uint32_t clientPid = 0;
  std::string command;
  std::vector<std::string> devices;    // uuids of the lease's
  std::vector<uint64_t> memoryLimits;  // of each, the lease's
};

// What a session has made of an order to suspend or to resume it.
struct Outcome {
  bool gone = false;       // its process is: what follows says nothing
  bool suspended = false;  // what the session is now
  std::string error;       // not empty: the order was not carried out, and why
  Suspended facts;         // of an order to suspend; kept has one number a device of the lease
};

class SessionTable final : private kj::TaskSet::ErrorHandler {
 public:
  static constexpr size_t kHistory = 256;
  struct Bounds {
    kj::Duration stop = 2 * kj::SECONDS;   // from the order to SIGKILL
    kj::Duration exit = 10 * kj::SECONDS;  // from the worker's own report to SIGKILL
  };

  // lost: called when a worker reports that a device broke.
  SessionTable(kj::Timer& timer, Bounds bounds, WorkerChild::Lost lost);
  // Called when a worker began a session or has ended.
  void onChange(std::function<void()> changed) { changed_ = std::move(changed); }
  // Has this machine room for so many bytes of pinned memory?
  void onHostMemory(std::function<bool(uint64_t bytes)> room) { hostRoom_ = std::move(room); }
  KJ_DISALLOW_COPY(SessionTable);

  // Before the worker is sent the start of a session: from here on the server's next life knows it
  // (onChange), whenever this one is killed. Until add or, where it could not be sent, withdraw.
  void announce(const SessionFacts& facts, pid_t worker);
  void withdraw();
  // From here the worker is the session's; the client's socket was handed over. `client`: the same socket.
  void add(SessionFacts facts, kj::Own<WorkerChild> worker, kj::AutoCloseFd client);
  // Ends all sessions of the lease; resolves when their processes are gone.
  kj::Promise<void> end(const Id& lease, const std::string& reason);
  kj::Promise<void> endAll(const std::string& reason);
  size_t living() const { return living_.size(); }
  size_t living(const Id& lease) const;
  std::vector<StoredWorker> workers() const;
  // A session of the lease is about to be added: until the result is destroyed.
  kj::Own<void> beginning(const Id& lease);
  // Resolves when none is.
  kj::Promise<void> begun(const Id& lease);

  // Sessions have a number, which none has had before.
  std::vector<uint64_t> numbers(const Id& lease) const;
  // Whose it is, for people.
  std::string describe(uint64_t number) const;
  // What a session answers to these; one order at a time for each. `copier`: its connection to the copier. A
  // worker that does not answer within `bound` is ended. What its answer says is checked against its lease
  // but for the amounts.
  kj::Promise<Outcome> suspend(uint64_t number, uint32_t drainMs, kj::AutoCloseFd copier, kj::Duration bound);
  kj::Promise<Outcome> resume(uint64_t number, kj::Duration bound);
  // Resolves when its process is gone.
  kj::Promise<void> endOne(uint64_t number, const std::string& reason);
  // Called when a worker asks for it to be suspended and resumed (WorkerReport.disturb).
  void onDisturb(std::function<void(const Id& lease, uint64_t number)> disturb) {
    disturb_ = std::move(disturb);
  }

  // Does one of the lease's sessions want its devices? While they are suspended: has one of them something to
  // do? Of a worker that never says anything (WorkerReport.activity) it counts as if it had.
  bool active(const Id& lease, bool suspended) const;
  // Called when a worker says something of it.
  void onActivity(std::function<void()> heard) { heardActivity_ = std::move(heard); }

  // The running ones, then the ended ones, the latest first.
  void write(kj::Function<capnp::List<schema::SessionState>::Builder(unsigned)> room) const;

 private:
  struct Session : kj::Refcounted {
    SessionFacts facts;
    kj::Own<WorkerChild> worker;
    kj::AutoCloseFd client;
    kj::TimePoint began = kj::origin<kj::TimePoint>();
    std::string text;  // why it ends, once known
    uint64_t startTicks = 0;
    uint64_t number = 0;  // its name in the account
    bool ordered = false;
    std::optional<schema::Activity> activity;       // as last said
    kj::Own<kj::PromiseFulfiller<Outcome>> answer;  // to an order; null: none is under way
    bool toSuspend = false;                         // that order
    kj::Vector<kj::Own<kj::PromiseFulfiller<void>>> gone;
  };
  struct Ended {
    SessionFacts facts;
    pid_t pid = 0;
    kj::TimePoint began = kj::origin<kj::TimePoint>();
    std::string text;
  };

  Session* find(uint64_t number) const;
  kj::Promise<void> listen(kj::Own<Session> session);
  // False: it was the last report.
  bool hear(Session& session, schema::WorkerReport::Reader report);
  void giveUp(Session& session, const kj::Exception& malformed);
  kj::Promise<Outcome> order(Session& session, capnp::MessageBuilder& message,
                             std::span<const int> descriptors, bool toSuspend, kj::Duration bound);
  void answered(Session& session, schema::SuspendReport::Reader report);
  kj::Promise<void> end(Session& session, const std::string& reason);
  void killAfter(Session& session, kj::Duration bound, const char* why);
  void finish(Session& session, const WorkerChild::Exit& exit);
  void serveMemory(Session& session, schema::MemoryRequest::Reader request);
  void taskFailed(kj::Exception&& exception) override;

  kj::Timer& timer_;
  Bounds bounds_;
  WorkerChild::Lost lost_;
  std::function<void()> changed_ = [] {};
  std::function<void(const Id& lease, uint64_t number)> disturb_ = [](const Id&, uint64_t) {};
  std::function<void()> heardActivity_ = [] {};
  std::function<bool(uint64_t bytes)> hostRoom_ = [](uint64_t) { return true; };
  std::map<Id, MemoryAccount> accounts_;  // of leases with living sessions
  uint64_t nextNumber_ = 1;
  std::list<kj::Own<Session>> living_;
  std::optional<StoredWorker> announced_;
  struct Beginnings {
    size_t count = 0;
    kj::Vector<kj::Own<kj::PromiseFulfiller<void>>> over;
  };
  std::map<Id, Beginnings> beginnings_;  // of leases with some
  std::deque<Ended> ended_;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server

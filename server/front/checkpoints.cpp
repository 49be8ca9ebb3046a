#include "server/front/checkpoints.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <optional>

#include "base/log.h"
#include "server/front/beside.h"

namespace gpupool::server {
namespace {

constexpr int kLookAgainMs = 100;

kj::Exception checkpointFailure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(text));
}

}  // namespace

// The moment in which all sessions of a lease stand still. Any thread.
class Checkpoints::Cut {
 public:
  explicit Cut(size_t sessions) : missing_(sessions) {}
  // One more stands still. Waits for all: "" or why it does not come to that.
  std::string arrive() {
    std::unique_lock lock(mutex_);
    if (--missing_ == 0) changed_.notify_all();
    // Each session's worker answers in its time, or is ended: either is seen by who calls `fail`.
    changed_.wait(lock, [this] { return missing_ == 0 || !why_.empty(); });
    return why_;
  }
  void fail(const std::string& why) {
    std::lock_guard lock(mutex_);
    if (why_.empty()) why_ = why;
    changed_.notify_all();
  }
  std::string why() const {
    std::lock_guard lock(mutex_);
    return why_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  size_t missing_;
  std::string why_;
};

struct Checkpoints::Written {
  std::string error;
  FileFacts facts;
};

// On a thread of its own. The worker may take long before it says the first word, since its programs have
// work to finish.
Checkpoints::Written Checkpoints::writeFile(int socket, int file, const std::shared_ptr<Cut>& cut) {
  Written written;
  for (pollfd first{socket, POLLIN, 0}; written.error.empty() && poll(&first, 1, kLookAgainMs) <= 0;)
    written.error = cut->why();
  StateSocket state(Descriptor(fcntl(socket, F_DUPFD_CLOEXEC, 0)), [] { return false; });
  if (!written.error.empty()) {
    state.answer(written.error);
    return written;
  }
  written.error = takeDown(state, file, written.facts, {.stands = [&] { return cut->arrive(); }});
  return written;
}

// What the threads use is theirs as long as they run.
struct Checkpoints::Job {
  struct One {
    uint64_t number = 0;
    std::string who;
    Descriptor file;
    Written written;
    MoveAnswer answer;
  };
  Manifest manifest;
  std::string path;
  std::optional<CheckpointFolder::Draft> draft;
  std::vector<One> sessions;
  std::shared_ptr<Cut> cut;
};

Checkpoints::Checkpoints(LeaseTable& leases, SessionTable& sessions, Suspension& suspension,
                         Settings settings)
    : leases_(leases), sessions_(sessions), suspension_(suspension), settings_(std::move(settings)) {
  if (settings_.folder.empty()) return;
  folder_ = std::make_shared<const CheckpointFolder>(settings_.folder, settings_.server);
  tidied_ = beside<bool>([folder = folder_] {
              folder->removeLeftovers();
              return true;
            }).fork();
}

kj::Promise<Checkpointed> Checkpoints::checkpoint(const Id& lease, uint32_t drainMs,
                                                  const std::string& name) {
  return suspension_.lanes().queue<Checkpointed>(
      lease, [this, lease, drainMs, name] { return writeNow(lease, drainMs, name); });
}

std::string Checkpoints::refuses(const Id& lease) const {
  const Grant* grant = leases_.admissible(lease);
  if (stopped_) return "the server is shutting down";
  if (grant == nullptr) return "lease " + lease.text() + " is not known here, or is ending";
  if (folder_ == nullptr)
    return "server " + settings_.server +
           " writes no checkpoints: it has no --checkpoint-folder (checkpoint_folder in server.yaml)";
  if (!grant->suspended) return "";
  return grant->aside ? "the lease waits for its turn, and its memory is not on its devices"
                      : "the lease is suspended: resume it first";
}

kj::Promise<Checkpointed> Checkpoints::writeNow(Id lease, uint32_t drainMs, const std::string& name) {
  if (const std::string why = refuses(lease); !why.empty()) return checkpointFailure(why);
  leases_.pauseToMove(lease);
  return suspension_.awaitBeginnings(lease)
      .then([this, lease, drainMs, name] { return writeAll(lease, drainMs, name); })
      .then([this, lease](Checkpointed done) {
        leases_.unpause(lease);
        GPUPOOL_INFO("lease %s: %u sessions written to %s, %llu bytes", lease.text().c_str(), done.sessions,
                     done.folder.c_str(), static_cast<unsigned long long>(done.bytes));
        return done;
      })
      // Not a promise, of which gcc 12 says that it may be destroyed uninitialized.
      .catch_([this, lease](kj::Exception&& exception) -> Checkpointed {
        leases_.unpause(lease);
        GPUPOOL_WARNING("lease %s: no checkpoint is written: %s", lease.text().c_str(),
                        exception.getDescription().cStr());
        kj::throwFatalException(kj::mv(exception));
      });
}

Manifest Checkpoints::describe(const Grant& grant) const {
  Manifest manifest;
  manifest.id = Id::random();
  manifest.lease = grant.id;
  manifest.tenant = grant.tenant;
  manifest.holder = grant.holder;
  manifest.server = settings_.server;
  manifest.writtenS = static_cast<uint64_t>(std::time(nullptr));
  manifest.rowsHash = settings_.rowsHash;
  for (const GrantedDevice& granted : grant.devices) {
    const Device& device = leases_.devices()[granted.index];
    manifest.driverVersion = device.driverVersion;
    manifest.devices.push_back({device.name, device.software, device.memoryBytes, granted.memoryBytes});
  }
  return manifest;
}

kj::Promise<Checkpointed> Checkpoints::writeAll(Id lease, uint32_t drainMs, const std::string& name) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr) return checkpointFailure("the lease ended meanwhile");
  auto job = std::make_shared<Job>();
  job->manifest = describe(*grant);
  for (const uint64_t number : sessions_.numbers(lease)) {
    const SessionFacts* facts = sessions_.facts(number);
    if (facts == nullptr) continue;
    auto& session = job->manifest.sessions.emplace_back();
    session.session = facts->session;
    session.epoch = facts->epoch;
    session.clientPid = facts->clientPid;
    session.command = facts->command;
    session.transport = facts->transport;
    session.file = facts->session.text();
    Job::One& one = job->sessions.emplace_back();
    one.number = number;
    one.who = sessions_.describe(number);
  }
  if (job->sessions.empty()) return checkpointFailure("the lease has no session: there is nothing to write");
  job->cut = std::make_shared<Cut>(job->sessions.size());
  auto begun = tidied_.addBranch().then([job, folder = folder_, name](bool) {
    return beside<bool>([job, folder, name] {
      job->path = folder->pathOf(name);
      job->draft.emplace(folder->begin(name));
      for (size_t i = 0; i < job->sessions.size(); ++i)
        job->sessions[i].file = job->draft->create(job->manifest.sessions[i].file);
      return true;
    });
  });
  return begun
      .then([this, job, drainMs](bool) {
        kj::Vector<kj::Promise<void>> all;
        for (size_t i = 0; i < job->sessions.size(); ++i)
          all.add(kj::evalNow([&] {
                    return writeOne(job, i, drainMs);
                  }).catch_([job](kj::Exception&& failed) {
                      job->cut->fail(failed.getDescription().cStr());
                    }).eagerlyEvaluate(nullptr));
        return kj::joinPromises(all.releaseAsArray());
      })
      .then([job]() -> kj::Promise<bool> {
        std::string why = job->cut->why();
        for (const Job::One& one : job->sessions)
          if (why.empty() && !one.written.error.empty()) why = one.who + ": " + one.written.error;
        // In any case there: the draft is removed there, too.
        return beside<bool>([job, why] {
          for (size_t i = 0; i < job->sessions.size(); ++i)
            job->manifest.sessions[i].facts = job->sessions[i].written.facts;
          if (why.empty()) job->draft->publish(kManifestName, encodeManifest(job->manifest));
          job->draft.reset();
          if (!why.empty()) throw std::runtime_error(why);
          return true;
        });
      })
      .then([job](bool) {
        Checkpointed done;
        done.folder = job->path;
        for (const Job::One& one : job->sessions) {
          ++done.sessions;
          done.bytes += one.written.facts.bytes;
          done.longestPauseMs = std::max(done.longestPauseMs, one.answer.pauseMs);
        }
        return done;
      });
}

// Resolves when worker and writer are done with it. What the worker answers is what ends the others' waiting:
// where the writer fails, it says so to its worker.
kj::Promise<void> Checkpoints::writeOne(std::shared_ptr<Job> job, size_t index, uint32_t drainMs) {
  Job::One& one = job->sessions[index];
  int ends[2];
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
  kj::AutoCloseFd workers(ends[0]);
  auto ours = std::make_shared<Descriptor>(ends[1]);
  // Each at once, and not when all of them are there: what one answers ends the others' waiting.
  auto written =
      beside<Written>(
          [job, ours, file = static_cast<int>(one.file)] { return writeFile(*ours, file, job->cut); })
          .then([job, index](Written written) { job->sessions[index].written = std::move(written); },
                [job, index](kj::Exception&& exception) {
                  job->sessions[index].written.error = exception.getDescription().cStr();
                })
          .eagerlyEvaluate(nullptr);
  SessionTable::MoveMeans means{drainMs, nullptr, kj::mv(workers),
                                settings_.bound + drainMs * kj::MILLISECONDS};
  auto answered =
      kj::evalNow([&] { return sessions_.copy(one.number, kj::mv(means)); })
          .then([job, index](MoveAnswer answer) {
            if (answer.gone) answer.error = "it ended while it was to be written";
            if (!answer.error.empty()) job->cut->fail(job->sessions[index].who + ": " + answer.error);
            job->sessions[index].answer = std::move(answer);
          })
          .catch_([job](kj::Exception&& failed) { job->cut->fail(failed.getDescription().cStr()); })
          .eagerlyEvaluate(nullptr);
  auto both = kj::heapArrayBuilder<kj::Promise<void>>(2);
  both.add(kj::mv(written));
  both.add(kj::mv(answered));
  return kj::joinPromises(both.finish());
}

}  // namespace gpupool::server

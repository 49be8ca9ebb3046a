#include "server/front/checkpoints.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <optional>

#include "base/log.h"
#include "base/transport_names.h"
#include "server/front/apart.h"
#include "server/front/beside.h"
#include "server/front/checkpoint_cut.h"
#include "server/front/checkpoint_files.h"
#include "server/front/play_back.h"

namespace gpupool::server {
namespace {

constexpr uint32_t kDisturbHoldDrainMs = 5'000;  // some tests' kernels wait for a later call
constexpr uint32_t kGoBackDrainMs = 30'000;      // as of the orders that name one, by default
// Nobody had memory of the lease when it was asked to leave: it was opened, and its owner ended, since.
constexpr kj::Duration kLentBound = 30 * kj::SECONDS;

kj::Exception checkpointFailure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(text));
}

}  // namespace

// What the threads use is theirs as long as they run.
struct Checkpoints::Job {
  struct One {
    uint64_t number = 0;
    uint64_t rowsHash = 0;  // as the session's client said it
    std::string who;
    Descriptor file;
    std::string error;  // of its writer
    FileFacts facts;
    MoveAnswer answer;
  };
  Manifest manifest;
  std::string path;
  std::optional<CheckpointFolder::Draft> draft;
  std::vector<One> sessions;
  std::shared_ptr<CheckpointCut> cut;
  Since since;

  // Of a lease that goes back: "" or why that session does not.
  std::string hasGoneOn(size_t index) const {
    if (since == nullptr) return "";
    const FileFacts &now = sessions[index].facts, &then = since->at(manifest.sessions[index].session);
    if (now.lastFrame == then.lastFrame && now.lastAside == then.lastAside) return "";
    const uint64_t more = now.lastFrame - then.lastFrame + now.lastAside - then.lastAside;
    return "the program has gone on since the checkpoint was written, with " + std::to_string(more) +
           (more == 1 ? " message" : " messages") + " to its GPUs: there is no way back to it";
  }
  // "" or why they are not the sessions that the checkpoint has.
  std::string hasOthers() const {
    bool same = since == nullptr || since->size() == sessions.size();
    for (const Manifest::Session& one : manifest.sessions)
      same = same && (since == nullptr || since->contains(one.session));
    return same ? "" : "a session of the lease has begun or ended since the checkpoint was written";
  }
  // The files of the checkpoint that this one replaces.
  std::set<std::string> replaced() const {
    std::set<std::string> files;
    if (since == nullptr) return files;
    files.insert(kManifestName);
    for (const auto& [session, facts] : *since) files.insert(session.text());
    return files;
  }
  std::string publish() {
    try {
      for (size_t i = 0; i < sessions.size(); ++i) {
        manifest.sessions[i].facts = sessions[i].facts;
        manifest.sessions[i].facts.rowsHash = sessions[i].rowsHash;
      }
      draft->publish(kManifestName, encodeManifest(manifest));
      return "";
    } catch (const std::exception& error) {
      return error.what();
    }
  }
};

// On a thread of its own.
void Checkpoints::writeFile(int socket, const std::shared_ptr<Job>& job, size_t index) {
  Job::One& one = job->sessions[index];
  CheckpointCut& cut = *job->cut;
  TakeDownSteps steps;
  steps.stands = [&] {
    const std::string why = job->hasGoneOn(index);
    return why.empty() ? cut.arrive() : why;
  };
  steps.written = [&] { return cut.finish([&] { return job->publish(); }, job->manifest.held); };
  one.error = takeDown(socket, [&] { return cut.why(); }, one.file, one.facts, steps);
}

Checkpoints::Checkpoints(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, Suspension& suspension,
                         WorkerPools& pool, const WorkerStarts& starts, Settings settings)
    : timer_(timer),
      leases_(leases),
      sessions_(sessions),
      suspension_(suspension),
      pool_(pool),
      settings_(std::move(settings)),
      notes_(settings_.holds),
      restorer_(timer, leases, sessions, pool, starts, notes_,
                {settings_.server, settings_.workerBound, settings_.clients, settings_.network}),
      tasks_(*this) {
  if (settings_.disturb)
    sessions_.onDisturb([this](const Id& lease, uint64_t) {
      tasks_.add(suspension_.lanes().queue<void>(lease, [this, lease] { return disturbNow(lease); }));
    });
  if (settings_.folder.empty()) return;
  folder_ = std::make_shared<const CheckpointFolder>(settings_.folder, settings_.server);
  tidied_ = beside<bool>([folder = folder_] {
              folder->removeLeftovers();
              return true;
            }).fork();
}

Checkpoints::~Checkpoints() noexcept {
  if (settings_.disturb) sessions_.onDisturb([](const Id&, uint64_t) {});
}

kj::Promise<Checkpointed> Checkpoints::checkpoint(const Id& lease, uint32_t drainMs,
                                                  const std::string& name) {
  return suspension_.lanes().queue<Checkpointed>(
      lease, [this, lease, drainMs, name] { return writeNow(lease, drainMs, name); });
}

kj::Promise<Suspended> Checkpoints::hold(const Id& lease, uint32_t drainMs, const std::string& name) {
  return suspension_.lanes().queue<Suspended>(
      lease, [this, lease, drainMs, name] { return holdNow(lease, drainMs, name); });
}

kj::Promise<void> Checkpoints::restore(const Id& lease, const std::string& name, bool running) {
  return suspension_.lanes().queue<void>(
      lease, [this, lease, name, running] { return restoreNow(lease, name, running); });
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
  return write(lease, drainMs, name, false).then([this, lease](std::shared_ptr<Job> job) {
    leases_.unpause(lease);
    return resultOf(*job);
  });
}

// The job, published. Else the lease runs as before.
kj::Promise<std::shared_ptr<Checkpoints::Job>> Checkpoints::write(Id lease, uint32_t drainMs,
                                                                  const std::string& name, bool held,
                                                                  Since since) {
  held ? leases_.pauseToHold(lease) : leases_.pauseToMove(lease);
  return suspension_.awaitBeginnings(lease)
      .then([this, lease, drainMs, name, held, since = std::move(since)] {
        return writeAll(lease, drainMs, name, held, since);
      })
      .then([lease](std::shared_ptr<Job> job) {
        GPUPOOL_INFO("lease %s: %zu sessions written to %s", lease.text().c_str(), job->sessions.size(),
                     job->path.c_str());
        return job;
      })
      // Not a promise, of which gcc 12 says that it may be destroyed uninitialized.
      .catch_([this, lease](kj::Exception&& exception) -> std::shared_ptr<Job> {
        leases_.unpause(lease);
        notes_.erase(lease);
        GPUPOOL_WARNING("lease %s: no checkpoint is written: %s", lease.text().c_str(),
                        exception.getDescription().cStr());
        kj::throwFatalException(kj::mv(exception));
      });
}

Checkpointed Checkpoints::resultOf(const Job& job) {
  Checkpointed done;
  done.folder = job.path;
  for (const Job::One& one : job.sessions) {
    ++done.sessions;
    done.bytes += one.facts.bytes;
    done.longestPauseMs = std::max(done.longestPauseMs, one.answer.pauseMs);
  }
  return done;
}

// ---- hold

std::string Checkpoints::refusesToHold(const Id& lease) const {
  if (std::string why = refuses(lease); !why.empty()) return why;
  if (leases_.overcommitted()) return "leases take turns here (overcommit), and those are not held in files";
  if (leases_.admissible(lease)->target)
    return "the lease is moving to other devices: end that first (gpupool migrate)";
  if (std::string lent = sessions_.lentText(lease); !lent.empty()) return lent;
  for (const uint64_t number : sessions_.numbers(lease)) {
    const SessionFacts* session = sessions_.facts(number);
    if (session == nullptr) continue;
    if (const std::string why = whyNotApart(*session, leases_.admissible(lease)->protectMs != 0);
        !why.empty())
      return sessions_.describe(number) + ": " + why;
    if (!settings_.network && transportApart(session->transport) != session->transport)
      return sessions_.describe(number) + ": the session shares memory with this server (transport " +
             session->transport +
             "), would go on over a network, and this server takes no network sessions: " +
             "start it with --listen";
  }
  return "";
}

kj::Promise<Suspended> Checkpoints::holdNow(Id lease, uint32_t drainMs, const std::string& name) {
  const Grant* grant = leases_.admissible(lease);
  if (grant != nullptr && grant->held && grant->suspended) {
    Suspended already = *grant->suspended;
    return kj::evalLater([already = std::move(already)] { return already; });
  }
  if (const std::string why = refusesToHold(lease); !why.empty()) return checkpointFailure(why);
  return leave(lease, drainMs, name);
}

kj::Promise<Suspended> Checkpoints::leave(Id lease, uint32_t drainMs, const std::string& name, Since since) {
  return write(lease, drainMs, name, true, std::move(since))
      .then([this, lease](std::shared_ptr<Job> job) {
        // Each is in its file. Whoever has not left, and has not ended, would go on beside that.
        kj::Vector<kj::Promise<void>> ends;
        for (const Job::One& one : job->sessions)
          if (!one.answer.gone && !one.answer.error.empty())
            ends.add(
                sessions_.endOne(one.number, "the session was to be held in files: " + one.answer.error));
        // One that has ended meanwhile may have left memory to sessions of other leases.
        return kj::joinPromises(ends.releaseAsArray())
            .then([this, lease] {
              return sessions_.takenBack(lease, kLentBound,
                                         "memory that it has of lease " + lease.text().substr(0, 8) +
                                             " goes: that is held in files, and has left its GPUs");
            })
            .then([job] { return job; });
      })
      .then([this, lease, name](std::shared_ptr<Job> job) {
        Suspended done;
        for (const Job::One& one : job->sessions) {
          done.movedBytes += one.facts.bytes;
          done.drainMs = std::max(done.drainMs, one.answer.drainMs);
          done.moveMs = std::max(done.moveMs, one.answer.pauseMs);
        }
        leases_.setHeld(lease, {job->manifest.id, name, settings_.server}, std::move(done));
        const Grant* grant = leases_.admissible(lease);
        if (grant == nullptr) kj::throwFatalException(checkpointFailure("the lease ended meanwhile"));
        return *grant->suspended;
      });
}

// ---- restore

kj::Promise<void> Checkpoints::restoreNow(Id lease, const std::string& name, bool running) {
  const Grant* grant = leases_.admissible(lease);
  if (stopped_) return checkpointFailure("the server is shutting down");
  if (grant == nullptr)
    return checkpointFailure("lease " + lease.text() + " is not known here, or is ending");
  if (!grant->held && grant->suspended) return checkpointFailure("the lease is not held in files");
  if (!grant->held && running) return goBack(lease, name);
  if (!grant->held) return kj::READY_NOW;  // it has been restored: the manager did not hear the answer
  if (folder_ == nullptr)
    return checkpointFailure("server " + settings_.server + " has no --checkpoint-folder any more");
  Manifest here = describe(*grant);
  here.id = grant->held->checkpoint;
  return restorer_.restore(lease, folder_, name, std::move(here));
}

kj::Promise<void> Checkpoints::goBack(Id lease, const std::string& name) {
  if (const std::string why = refusesToHold(lease); !why.empty()) return checkpointFailure(why);
  Manifest here = describe(*leases_.admissible(lease));
  auto since = std::make_shared<std::map<Id, FileFacts>>();
  return beside<bool>([folder = folder_, name, here = std::move(here), since] {
           const OpenCheckpoint open = openCheckpoint(*folder, name, here, Written::running);
           for (const Manifest::Session& one : open.manifest.sessions) since->emplace(one.session, one.facts);
           return true;
         })
      .then([this, lease, name, since](bool) -> kj::Promise<Suspended> {
        if (const std::string why = refusesToHold(lease); !why.empty()) return checkpointFailure(why);
        return leave(lease, kGoBackDrainMs, name, since);
      })
      .then([this, lease, name](const Suspended&) {
        // The manager leases its devices to nobody: there it runs.
        return restoreNow(lease, name, false)
            .catch_([this, lease, name](kj::Exception&& failed) -> kj::Promise<void> {
              const Grant* grant = leases_.admissible(lease);
              if (grant == nullptr || !grant->held) return kj::mv(failed);
              return checkpointFailure(std::string(failed.getDescription().cStr()) +
                                       "; the lease is held in " + name + " now");
            });
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
  manifest.rowsHash = pool_.currentRows();
  for (const GrantedDevice& granted : grant.devices) {
    const Device& device = leases_.devices()[granted.index];
    manifest.driverVersion = device.driverVersion;
    manifest.devices.push_back({device.name, device.software, device.memoryBytes, granted.memoryBytes});
  }
  return manifest;
}

std::shared_ptr<Checkpoints::Job> Checkpoints::makeJob(const Grant& grant, bool held) const {
  auto job = std::make_shared<Job>();
  job->manifest = describe(grant);
  job->manifest.held = held;
  for (const uint64_t number : sessions_.numbers(grant.id)) {
    const SessionFacts* facts = sessions_.facts(number);
    if (facts == nullptr) continue;
    auto& session = job->manifest.sessions.emplace_back();
    session.session = facts->session;
    session.epoch = facts->epoch;
    session.clientPid = facts->clientPid;
    session.command = facts->command;
    session.transport = transportApart(facts->transport);
    session.file = facts->session.text();
    Job::One& one = job->sessions.emplace_back();
    one.number = number;
    one.rowsHash = facts->rowsHash;
    one.who = sessions_.describe(number);
  }
  job->cut = std::make_shared<CheckpointCut>(job->sessions.size());
  return job;
}

kj::Promise<std::shared_ptr<Checkpoints::Job>> Checkpoints::writeAll(Id lease, uint32_t drainMs,
                                                                     const std::string& name, bool held,
                                                                     Since since) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr) return checkpointFailure("the lease ended meanwhile");
  auto job = makeJob(*grant, held);
  if (job->sessions.empty()) return checkpointFailure("the lease has no session: there is nothing to write");
  job->since = std::move(since);
  if (const std::string why = job->hasOthers(); !why.empty()) return checkpointFailure(why);
  if (held) notes_.write(lease, {job->manifest.id, name, settings_.server});
  auto begun = tidied_.addBranch().then([job, folder = folder_, name](bool) {
    return beside<bool>([job, folder, name] {
      job->path = folder->pathOf(name);
      job->draft.emplace(folder->begin(name, job->replaced()));
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
      .then([job] {
        std::string why = job->cut->published() ? "" : job->cut->why();
        for (const Job::One& one : job->sessions)
          if (why.empty() && !job->cut->published()) why = one.who + ": " + one.error;
        // What has no place is removed there, too.
        return beside<bool>([job, why] {
          job->draft.reset();
          if (!why.empty()) throw std::runtime_error(why);
          return true;
        });
      })
      .then([job](bool) { return job; });
}

// Resolves when worker and writer are done with it. What the worker answers is what ends the others' waiting:
// where the writer fails, it says so to its worker.
kj::Promise<void> Checkpoints::writeOne(std::shared_ptr<Job> job, size_t index, uint32_t drainMs) {
  const uint64_t number = job->sessions[index].number;
  const SessionFacts* facts = sessions_.facts(number);
  auto [workers, end] = stateSocket();
  auto ours = std::make_shared<Descriptor>(end.release());
  // Each at once, and not when all of them are there: what one answers ends the others' waiting.
  auto written = beside<bool>([job, ours, index] {
                   writeFile(*ours, job, index);
                   return true;
                 })
                     .ignoreResult()
                     .eagerlyEvaluate(nullptr);
  SessionTable::MoveMeans means{drainMs, nullptr, kj::mv(workers),
                                settings_.bound + drainMs * kj::MILLISECONDS};
  auto answered =
      kj::evalNow([&]() -> kj::Promise<MoveAnswer> {
        if (facts == nullptr || !job->manifest.held) return sessions_.copy(number, kj::mv(means));
        return sessions_.hold(number, facts->epoch + 1, kj::mv(means));
      })
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

// ---- for tests ----

kj::Promise<void> Checkpoints::disturbNow(Id lease) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr || grant->paused) return kj::READY_NOW;
  const std::string name = "disturbed-" + std::to_string(++asked_);
  return kj::evalNow([&] {
           if (const std::string why = refusesToHold(lease); !why.empty())
             kj::throwFatalException(checkpointFailure(why));
           return goAndComeBack(lease, name);
         })
      .then([] { return std::string(); },
            [](kj::Exception&& exception) { return std::string(exception.getDescription().cStr()); })
      .then([this](const std::string& why) {
        heldAndBack_ += why.empty() ? 1 : 0;
        GPUPOOL_INFO("disturbing a lease: %s (%llu of %llu)",
                     why.empty() ? "held and restored" : ("not held: " + why).c_str(),
                     static_cast<unsigned long long>(heldAndBack_), static_cast<unsigned long long>(asked_));
      });
}

kj::Promise<void> Checkpoints::goAndComeBack(Id lease, const std::string& name) {
  return leave(lease, kDisturbHoldDrainMs, name)
      .then([this, lease, name](const Suspended&) {
        leases_.reserveAgain(lease);  // the manager did not order it, and would lease its devices
        return restoreNow(lease, name, false);
      })
      .then([folder = folder_, name] {
        return beside<bool>([path = folder->pathOf(name)] {
          std::filesystem::remove_all(path);
          return true;
        });
      })
      .ignoreResult();
}

void Checkpoints::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("checkpoints: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server

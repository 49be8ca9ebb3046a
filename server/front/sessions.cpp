#include "server/front/sessions.h"

#include <capnp/message.h>

#include "base/log.h"
#include "base/process_name.h"
#include "schema/convert.h"
#include "transports/last_words.h"

namespace gpupool::server {
namespace {

// A worker may say more, and each beat repeats it.
constexpr size_t kMostHindrances = 4, kMostHindrance = 150;

}  // namespace

void SessionFacts::place(const Placement& placement, const std::vector<Device>& inventory) {
  deviceEpoch = placement.epoch;
  devices.clear();
  memoryLimits.clear();
  for (const GrantedDevice& device : placement.devices) {
    devices.push_back(inventory[device.index].uuid);
    memoryLimits.push_back(device.memoryBytes);
  }
}

SessionTable::SessionTable(kj::Timer& timer, Bounds bounds, WorkerChild::Lost lost)
    : timer_(timer), bounds_(bounds), lost_(std::move(lost)), offers_(0), receipts_({}), tasks_(*this) {
  share(newSharing());
}

StoredWorker SessionTable::stored(const SessionFacts& facts, pid_t worker, uint64_t startTicks,
                                  uint64_t number) {
  return {worker,
          startTicks,
          facts.lease,
          facts.devices,
          StoredSession{facts.session, facts.epoch, facts.deviceEpoch, facts.clientPid, facts.command,
                        facts.transport, facts.rowsHash, facts.transportNamed},
          number};
}

// It will have the next number, unless it moves.
void SessionTable::announce(const SessionFacts& facts, pid_t worker) {
  uint64_t number = nextNumber_;
  for (const auto& session : living_)
    if (session->facts.session == facts.session && session->facts.lease == facts.lease)
      number = session->number;
  announced_ = stored(facts, worker, processStartTicks(worker), number);
  changed_();
}

void SessionTable::withdraw() {
  announced_.reset();
  changed_();
}

void SessionTable::add(SessionFacts facts, kj::Own<WorkerChild> worker, kj::AutoCloseFd client) {
  auto session = kj::refcounted<Session>();
  session->facts = std::move(facts);
  session->worker = kj::mv(worker);
  session->client = kj::mv(client);
  session->number = nextNumber_++;
  accounts_.try_emplace(accountOf(session->facts), session->facts.memoryLimits);
  session->began = timer_.now();
  GPUPOOL_INFO("session %s: began, worker %d, client %u (%s)", session->facts.session.text().c_str(),
               session->worker->pid(), session->facts.clientPid, session->facts.command.c_str());
  watch(*session);
  living_.push_back(kj::mv(session));
  announced_.reset();
  changed_();
}

void SessionTable::readopt(SessionFacts facts, kj::Own<WorkerChild> worker, kj::AutoCloseFd client,
                           Earlier earlier) {
  const uint64_t number = earlier.number != 0 ? earlier.number : nextNumber_++;
  auto& account = accounts_.try_emplace(accountOf(facts), facts.memoryLimits).first->second;
  for (uint32_t place = 0; place < earlier.taken.size(); ++place)
    KJ_REQUIRE(account.take(number, place, earlier.taken[place]), "a session has more than its lease");
  auto session = kj::refcounted<Session>();
  session->facts = std::move(facts);
  session->worker = kj::mv(worker);
  session->client = kj::mv(client);
  session->number = number;
  session->counts = earlier.counts;
  session->began = timer_.now();
  GPUPOOL_INFO("session %s: goes on, worker %d, client %u (%s)%s", session->facts.session.text().c_str(),
               session->worker->pid(), session->facts.clientPid, session->facts.command.c_str(),
               earlier.waits ? ", which has not come yet" : "");
  const bool waits = earlier.waits;
  if (waits) {
    session->role = Role::next;
    session->beginning = beginning(session->facts.lease);
  } else {
    noteEarlier(*session, std::move(earlier));
  }
  watch(*session);  // what it shares it may have said already
  if (waits) endLateArrival(*session, bounds_.arrivingClient, "its client did not come in time");
  (waits ? next_ : living_).push_back(kj::mv(session));
  changed_();
}

void SessionTable::noteEarlier(Session& session, Earlier earlier) {
  session.earlier.emplace().account = accountOf(session.facts);
  session.earlier->session = session.number;
  session.owedShares = earlier.shares;
  sharesKnown_ = false;
  if (earlier.state) {
    session.settles = kj::evalLater([state = std::move(*earlier.state)] { return state; });
  } else {
    auto pair = kj::newPromiseAndFulfiller<Outcome>();
    session.answer = kj::mv(pair.fulfiller);
    session.settles = kj::mv(pair.promise);
  }
}

void SessionTable::watch(Session& session) {
  session.worker->onLost(lost_);
  session.startTicks = processStartTicks(session.worker->pid());
  // The worker is the session's: it asks no more when that is gone.
  session.worker->onMemory(
      [this, &session](schema::MemoryRequest::Reader request) { serveMemory(session, request); });
  session.worker->onShare([this, &session](schema::ShareReport::Reader report, kj::AutoCloseFd descriptor) {
    hearShare(session, report, kj::mv(descriptor));
  });
  session.worker->onMoved([this, &session](schema::MoveReport::Reader report) { moved(session, report); });
  tasks_.add(listen(kj::addRef(session)));
  auto exit = session.worker->exited();
  tasks_.add(exit.then(
      [this, kept = kj::addRef(session)](const WorkerChild::Exit& exit) mutable { finish(*kept, exit); }));
}

kj::Promise<void> SessionTable::listen(kj::Own<Session> session) {
  // What is malformed right now is thrown to `giveUp` as well.
  auto report = kj::evalNow([&] { return session->worker->receive(); });
  auto kept = kj::addRef(*session);
  return report.then(
      [this,
       session = kj::mv(session)](kj::Maybe<kj::Own<WorkerMessage>> maybe) mutable -> kj::Promise<void> {
        KJ_IF_MAYBE (message, maybe) {
          bool more = false;
          KJ_IF_MAYBE (wrong, kj::runCatchingExceptions([&] { more = hear(*session, (*message)->get()); }))
            giveUp(*session, *wrong);
          if (more) return listen(kj::mv(session));
          return kj::READY_NOW;
        }
        killAfter(*session, bounds_.exit, "closed its socket and did not exit");
        return kj::READY_NOW;
      },
      [this, session = kj::mv(kept)](kj::Exception&& exception) mutable { giveUp(*session, exception); });
}

bool SessionTable::hear(Session& session, schema::WorkerReport::Reader report) {
  if (report.isEnded()) {
    if (session.text.empty()) session.text = report.getEnded().cStr();
    killAfter(session, bounds_.exit, "did not exit after its session ended");
    return false;
  }
  // Whatever becomes of the session: its program has done that here.
  if (report.isCounts()) count(session, report.getCounts());
  // What becomes of the session then is its old worker's to say.
  if (report.isRebuilt() && session.role == Role::next) {
    if (report.getRebuilt().size() != 0)
      GPUPOOL_INFO("session %s: its next worker %d could not rebuild it: %s",
                   session.facts.session.text().c_str(), session.worker->pid(), report.getRebuilt().cStr());
    else if (arrives(session))
      endLateArrival(session, bounds_.arrivingClient, "its client did not come");
  }
  if (session.role == Role::old) return true;
  if (report.isActivity()) {
    session.activity = report.getActivity();
    ++session.activityChanges;
    heardActivity_();
  }
  if (report.isHindrances()) {
    session.hindrances.clear();
    for (auto one : report.getHindrances())
      if (session.hindrances.size() < kMostHindrances)
        session.hindrances.push_back(std::string(one.cStr()).substr(0, kMostHindrance));
  }
  if (report.isLog()) {
    const auto log = report.getLog();
    session.log = {log.getFrameBytes(), log.getPayloadBytes(), log.getWanted(),
                   std::string(log.getObstacle().cStr()).substr(0, kMostHindrance)};
  }
  if (report.isDisturb()) disturb_(session.facts.lease, session.number);
  if (session.role == Role::next) return true;
  if (report.isSuspended()) answered(session, report.getSuspended());
  return true;
}

void SessionTable::count(Session& session, schema::SessionCounts::Reader said) {
  const SessionCounts now{said.getCalls(), said.getAwaited(), said.getToDeviceBytes(),
                          said.getFromDeviceBytes()};
  // A worker is not trusted: counters never fall.
  const auto more = [&](uint64_t SessionCounts::* member) {
    return now.*member - std::min(now.*member, session.counts.*member);
  };
  counted_(session.facts.lease, {more(&SessionCounts::calls), more(&SessionCounts::awaited),
                                 more(&SessionCounts::toDeviceBytes), more(&SessionCounts::fromDeviceBytes)});
  session.counts = now;
}

void SessionTable::giveUp(Session& session, const kj::Exception& malformed) {
  if (session.text.empty()) session.text = malformed.getDescription().cStr();
  session.worker->kill();
}

void SessionTable::killAfter(Session& session, kj::Duration bound, const char* why) {
  // Over with its exit: until then, and no longer, its process and its descriptors are kept.
  auto exit = session.worker->exited();
  auto over = timer_.afterDelay(bound).exclusiveJoin(exit.ignoreResult());
  tasks_.add(over.then([why, kept = kj::addRef(session)]() mutable {
    if (kept->worker->gone()) return;
    GPUPOOL_WARNING("worker %d %s: killed", kept->worker->pid(), why);
    kept->worker->kill();
  }));
}

kj::Promise<void> SessionTable::end(Session& session, const std::string& reason) {
  if (session.exit) return kj::READY_NOW;
  auto pair = kj::newPromiseAndFulfiller<void>();
  session.gone.add(kj::mv(pair.fulfiller));
  if (!session.ordered && session.text.empty()) session.text = reason;
  // The worker that the session leaves would take it for dead. When that one is gone, it is dropped.
  const Session* leaves = session.role == Role::next ? find(session.number) : nullptr;
  const bool later = leaves != nullptr && leaves->ordered && !leaves->exit;
  if (!session.ordered && !later) {
    session.ordered = true;
    if (session.worker->sendStop(reason)) {
      killAfter(session, bounds_.stop, "did not stop when told");
    } else {
      session.worker->kill();
    }
  }
  return kj::mv(pair.promise);
}

kj::Promise<void> SessionTable::end(const Id& lease, const std::string& reason) {
  kj::Vector<kj::Promise<void>> gone;
  for (auto* list : {&living_, &next_, &old_})
    for (auto& session : *list)
      if (session->facts.lease == lease) gone.add(end(*session, reason));
  return kj::joinPromises(gone.releaseAsArray());
}

kj::Promise<void> SessionTable::endAll(const std::string& reason,
                                       const std::function<bool(const SessionFacts&)>& leaves) {
  kj::Vector<kj::Promise<void>> gone;
  for (auto* list : {&living_, &next_, &old_})
    for (auto& session : *list) {
      if (list == &living_ && !session->ordered && leaves && leaves(session->facts))
        leaveAtOnce(*session, reason);
      gone.add(end(*session, reason));
    }
  return kj::joinPromises(gone.releaseAsArray());
}

// As if it had died: its client makes the calls since its checkpoint again, and what the worker would still
// answer only differs from that.
void SessionTable::leaveAtOnce(Session& session, const std::string& reason) {
  session.ordered = true;
  session.text = transport::kLeavingWords + reason;
  session.worker->kill();
}

void SessionTable::leave(const Id& lease, const std::string& reason) {
  for (auto& session : living_)
    if (session->facts.lease == lease && !session->ordered) leaveAtOnce(*session, reason);
  tasks_.add(end(lease, reason));
}

size_t SessionTable::living(const Id& lease) const {
  size_t count = 0;
  for (const auto& session : living_) count += session->facts.lease == lease ? 1 : 0;
  return count;
}

bool SessionTable::uses(const Id& lease, uint64_t deviceEpoch) const {
  for (const auto* sessions : {&living_, &next_})
    for (const auto& session : *sessions)
      if (!session->dropped && accountOf(session->facts) == AccountName(lease, deviceEpoch)) return true;
  return false;
}

void SessionTable::finish(Session& session, const WorkerChild::Exit& exit) {
  // Its last reports may lie in the socket or on the way to `listen`: the exit is seen on another descriptor.
  kj::runCatchingExceptions([&] {
    const std::string said = session.worker->lastWords();
    if (session.text.empty()) session.text = said;
  });
  switch (session.role) {
    case Role::serving:
      return finishServing(session, exit);
    case Role::next:
      return finishNext(session, exit);
    case Role::old:
      return finishOld(session, exit);
  }
}

std::string SessionTable::endText(const Session& session, const WorkerChild::Exit& exit) {
  if (session.text.empty()) return "the worker " + exit.text;
  return exit.clean || session.ordered ? session.text : session.text + "; the worker " + exit.text;
}

void SessionTable::remember(const Session& session, std::string text) {
  ended_.push_front({session.facts, session.worker->pid(), session.began, std::move(text)});
  if (ended_.size() > kHistory) ended_.pop_back();
}

// Of the session: there is nobody else who serves it.
void SessionTable::conclude(Session& session, const WorkerChild::Exit& exit, std::string text) {
  // Of a clean end too: where the worker's own words did not get through in its time to close, as to a busy
  // client over a network, these do. Who has heard, or has left, does not read them.
  transport::sayLastWords(session.client, text);
  session.client = nullptr;
  if (session.formerClient.get() >= 0) transport::sayLastWords(session.formerClient, session.formerEnd);
  session.formerClient = nullptr;
  const auto level = exit.clean || session.ordered ? log::Level::info : log::Level::warning;
  if (log::enabled(level))
    log::write(level, "session %s: ended: %s", session.facts.session.text().c_str(), text.c_str());
  remember(session, std::move(text));
  for (auto& fulfiller : session.gone) fulfiller->fulfill();
  if (session.answer.get() != nullptr) session.answer->fulfill(Outcome{.gone = true});
  if (session.moved.get() != nullptr) session.moved->fulfill(MoveAnswer{.gone = true});
  leaveShares(session);
  const auto concluded = takeFrom(living_, session);
  lookAtOwedShares();
  leaveAccount(accountOf(concluded->facts), concluded->number);
  session.dropped = true;  // another process may have its socket: what comes there is nobody's any more
  changed_();
}

std::vector<uint64_t> SessionTable::allNumbers() const {
  std::vector<uint64_t> all;
  for (const auto* sessions : {&living_, &next_, &old_})
    for (const auto& session : *sessions)
      if (!session->worker->gone()) all.push_back(session->number);
  if (announced_) all.push_back(announced_->number);
  return all;
}

std::vector<StoredWorker> SessionTable::workers() const {
  std::vector<StoredWorker> list;
  for (const auto* sessions : {&living_, &next_, &old_})
    for (const auto& session : *sessions)
      if (!session->worker->gone()) {
        list.push_back(stored(session->facts, session->worker->pid(), session->startTicks, session->number));
        // One that is about to end ends with this process. Of the two between which a session moves only the
        // one that has it answers.
        if (session->role == Role::old || session->ordered) list.back().session.reset();
      }
  if (announced_) list.push_back(*announced_);
  return list;
}

void SessionTable::write(kj::Function<capnp::List<schema::SessionState>::Builder(unsigned)> room) const {
  auto list = room(static_cast<unsigned>(living_.size() + ended_.size()));
  unsigned at = 0;
  const auto put = [&](const SessionFacts& facts, pid_t pid, kj::TimePoint began, const std::string& text,
                       bool ended) {
    auto state = list[at++];
    schema::write(facts.session, state.initSession());
    schema::write(facts.lease, state.initLease());
    state.setWorkerPid(static_cast<uint32_t>(pid));
    state.setClientPid(facts.clientPid);
    state.setCommand(facts.command);
    state.setAgeMs((timer_.now() - began) / kj::MILLISECONDS);
    state.setEnded(ended);
    state.setText(text);
  };
  for (const auto& session : living_)
    put(session->facts, session->worker->pid(), session->began, session->text, false);
  for (const auto& ended : ended_) put(ended.facts, ended.pid, ended.began, ended.text, true);
}

void SessionTable::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("sessions: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server

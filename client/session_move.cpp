// The session goes to another worker (schema/frame.h, "A move"). The service thread hears what the worker
// says, and a thread of its own, the mover, carries it out: it may wait, while host functions and aside calls
// are served as always. What it holds keeps every other thread from sending, and lets go of them all at once.
#include <algorithm>
#include <map>
#include <system_error>

#include "base/log.h"
#include "base/signals.h"
#include "base/transport_names.h"
#include "client/holder.h"
#include "client/session.h"
#include "transports/waiting.h"

namespace gpupool::client {

using schema::Notice;
using schema::NoticeType;
using transport::Channel;
using transport::Peer;

namespace {

constexpr std::chrono::seconds kReachBound{60};  // until the new worker must have greeted
constexpr std::chrono::hours kForLong{24 * 365};
constexpr std::chrono::seconds kPartingBound{1};    // how long a worker that is left may take to read it
constexpr std::chrono::seconds kExitBound{1};       // what a move may hold up the program's end
constexpr std::chrono::milliseconds kStayLook{50};  // whether the worker has said that the session stays
constexpr char kAgain[] = "; start the program again";

transport::Deadline within(std::chrono::milliseconds wait) { return transport::Clock::now() + wait; }

// What tells a device from another one of its kind, and what the machine around it is like.
bool belongsToOne(int attribute) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
    case CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID:
    case CU_DEVICE_ATTRIBUTE_NUMA_ID:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
      return true;
    default:
      return false;
  }
}

}  // namespace

// ---- what the worker says ----

void Session::hearMove(const Notice& notice, const schema::MovedBody& moved) {
  std::lock_guard lock(moveMutex_);
  if (!course_.hear(notice.type, notice.effect, moved)) {
    GPUPOOL_WARNING("the worker sent a notice of a move out of its order: type %u",
                    static_cast<unsigned>(notice.type));
    return;
  }
  moveChanged_.notify_all();
  if (!moverRuns_ && course_.stage() != Stage::none) startMover();
}

// Under moveMutex_.
void Session::startMover() {
  try {
    SignalsBlocked blocked;
    std::thread([this] { moveLoop(); }).detach();
    moverRuns_ = true;
  } catch (const std::system_error& error) {
    GPUPOOL_WARNING("no thread to move the session by: %s", error.what());
    course_.lose();  // the worker hears nothing and gives the move up
    course_.end();
  }
}

bool Session::wentOver(const transport::Connection* gone) {
  std::unique_lock lock(moveMutex_);
  course_.lose();
  moveChanged_.notify_all();
  // The mover's waits are bounded, and so is this one.
  while (course_.open() && link().get() == gone && !closing_) moveChanged_.wait_for(lock, kTick);
  lock.unlock();
  return link().get() != gone;
}

bool Session::moveNoMore() {
  std::lock_guard lock(moveMutex_);
  if (course_.stage() != Stage::none) return false;
  course_.leave();
  return true;
}

bool Session::leaveMove() {
  std::unique_lock lock(moveMutex_);
  course_.leave();
  moveChanged_.notify_all();
  for (transport::TimeLeft time(kExitBound); course_.stage() != Stage::none && time.any();)
    moveChanged_.wait_for(lock, kStayLook);
  return course_.stage() == Stage::none && !course_.mute();
}

// ---- the mover ----

void Session::moveLoop() {
  while (true) {
    bool stepped = false;
    for (; carryOutMove(); stepped = true) awaitOne();
    if (stepped) goOnSending();
    std::lock_guard lock(moveMutex_);
    moveChanged_.notify_all();
    if (course_.end()) continue;
    moverRuns_ = false;
    return;
  }
}

bool Session::moveIsOver() const {
  std::lock_guard lock(moveMutex_);
  return course_.over() || (course_.held() && course_.leaving());
}

bool Session::isHeld() const {
  std::lock_guard lock(moveMutex_);
  return course_.held();
}

bool Session::isLeaving() const {
  std::lock_guard lock(moveMutex_);
  return course_.leaving();
}

bool Session::isApart() const {
  std::lock_guard lock(moveMutex_);
  return mapsMemory_ && course_.apart();
}

bool Session::mayNotSpeak() const {
  std::lock_guard lock(moveMutex_);
  return course_.mute();
}

bool Session::awaitStage(Stage stage) {
  std::unique_lock lock(moveMutex_);
  const auto before = static_cast<Stage>(static_cast<int>(stage) - 1);
  while (course_.stage() == before) moveChanged_.wait_for(lock, kTick);
  return course_.stage() == stage;
}

bool Session::sayControl(NoticeType type, const void* body, size_t bytes, transport::Deadline deadline,
                         uint64_t effect) {
  const size_t whole = sizeof(Notice) + bytes;
  std::byte* room = deadline == transport::kForever ? reserve(whole, Channel::control)
                                                    : connection_->reserve(Channel::control, whole, deadline);
  if (room == nullptr) return false;
  const Notice notice{type, epoch_, effect};
  std::memcpy(room, &notice, sizeof notice);
  if (bytes != 0) std::memcpy(room + sizeof notice, body, bytes);
  connection_->commit(Channel::control, whole);
  return true;
}

bool Session::sayStage(Stage stage, NoticeType type, uint64_t last) {
  uint64_t effect = 0;
  {
    std::lock_guard lock(moveMutex_);  // first: the worker's answer may come at once
    if (!course_.reach(stage)) return false;
    effect = course_.effect();
  }
  const schema::StoppedBody body{last};
  return sayControl(type, &body, sizeof body, transport::kForever, effect);
}

// Here, and not when the session has left its worker. Loading a library waits for threads that load one, and
// these may wait in a call for the end of a move that has stopped them.
bool Session::mayGoApart() {
  if (!isApart()) return true;
  std::string why;
  try {
    transport::load(std::string(transportWith(TransportFacts::Reach::anyHost).name));
    return true;
  } catch (const std::exception& error) {
    why = error.what();
  }
  GPUPOOL_WARNING("the session does not leave this machine: %s", why.c_str());
  std::lock_guard control(controlMutex_);
  uint64_t effect = 0;
  {
    std::lock_guard lock(moveMutex_);
    if (!course_.refuse()) return false;
    effect = course_.effect();
  }
  sayControl(NoticeType::stays, nullptr, 0, within(kPartingBound), effect);
  return false;
}

// Behind `stopped`.
bool Session::wantsStep() const {
  std::lock_guard lock(moveMutex_);
  return course_.stage() == Stage::prepared;
}

// The device waits for what the program calls next. Other frames wait until the next attempt to stop has
// begun, or for kStepBound: a thread that is inside `named`, which that attempt waits for, may need a frame
// of another thread.
void Session::awaitOne() {
  constexpr std::chrono::milliseconds kComes{20};
  std::unique_lock frames(enqueueMutex_);
  for (transport::TimeLeft time(kComes); seq_ == stepsFrom_ && time.any() && !moveIsOver();)
    stepped_.wait_for(frames, time.left());
}

void Session::holdBack(std::unique_lock<std::mutex>& frames) {
  if (Transfers::isInside()) return;
  for (transport::TimeLeft time(kStepBound); steps_ && seq_ != stepsFrom_ && time.any();)
    stepped_.wait_for(frames, time.left());
}

void Session::goOnSending() {
  std::lock_guard frames(enqueueMutex_);
  if (std::exchange(steps_, false)) stepped_.notify_all();
}

// Each line holds back more of the other threads, in the order in which they may wait for one another. True:
// the worker wants to have one more frame first.
bool Session::carryOutMove() {
  if (!mayGoApart()) return false;
  const auto cancelled = [this] { return moveIsOver(); };
  const Transfers::Closed named(transfers_, Transfers::named, cancelled);
  if (!named) return false;
  std::lock_guard frames(enqueueMutex_);
  const bool shared = mapsMemory_;
  if (std::exchange(steps_, false)) stepped_.notify_all();
  {
    std::lock_guard control(controlMutex_);
    if (!sayStage(Stage::stopped, NoticeType::stopped, seq_)) return false;
  }
  if (!awaitStage(Stage::drained)) {
    steps_ = wantsStep();
    stepsFrom_ = seq_;
    return steps_;
  }
  if (const MoveHooks* hooks = moveHooks_;
      hooks != nullptr && hooks->settle != nullptr && !shared && mayShare())
    hooks->settle();
  const Transfers::Closed alone(transfers_, Transfers::alone, cancelled);
  if (!alone) return false;
  std::unique_lock control(controlMutex_);
  setStill(kMoving, true);
  if (log_ != nullptr) log_->cut(seq_, asides_.load(std::memory_order_relaxed));
  if (readReplies() && sayStage(Stage::quiet, NoticeType::quiet, asides_.load(std::memory_order_relaxed)) &&
      awaitStage(Stage::moved))
    goOver();
  if (mayNotSpeak()) {  // the program ends, and the others must not get through before that
    closing_ = true;
    connection_->close();
  }
  setStill(kMoving, false);
  control.unlock();
  if (const MoveHooks* hooks = moveHooks_; shared && !mapsMemory_ && hooks != nullptr) bring(*hooks);
  return false;
}

// No frame may come before it, so without it there is none.
void Session::bring(const MoveHooks& hooks) {
  try {
    hooks.bring();
  } catch (const std::bad_alloc&) {
    tellReason("there is no memory for a copy of what kernels address; start the program again");
    words_->setSticky(CUDA_ERROR_DEVICE_UNAVAILABLE);
  }
}

// Every frame is served, so every reply is on its way; what was asked by a thread that now waits for us is
// read here.
bool Session::readReplies() {
  std::unique_lock lock(replyMutex_);
  while (receiving_ || !waiters_.empty()) {
    if (lost_ || moveIsOver()) return false;
    if (receiving_)
      replied_.wait_for(lock, kTick);
    else
      readReply(lock);
  }
  return true;
}

// The old worker goes as soon as it has heard that; there is no way back from here.
void Session::goAway() {
  uint64_t effect = 0;
  {
    std::lock_guard lock(moveMutex_);
    effect = course_.effect();
    if (!course_.reach(Stage::going))
      return;  // the worker said first that the session stays, or the program ends
  }
  sayControl(NoticeType::left, nullptr, 0, within(kPartingBound), effect);
  NextWorker next;
  std::string why;
  if (reachNext(next, why)) return switchTo(next);
  if (next.connection != nullptr) next.connection->close();
  beside_ = nullptr;
  if (!why.ends_with(kAgain)) why += kAgain;  // the lease's holder may have said so
  if (isLeaving())
    closing_ = true;  // nothing is lost, and nobody says so
  else
    tellReason("the session was held in files, and does not go on: " + why);
  connection_->close();  // no thread may still send to the worker that was left
  std::lock_guard lock(moveMutex_);
  course_.arrive();
  moveChanged_.notify_all();
}

void Session::goOver() {
  if (isHeld()) return goAway();
  NextWorker next;
  std::string why;
  const bool reached = reachNext(next, why);
  bool decided = false;
  uint64_t effect = 0;
  {
    std::lock_guard lock(moveMutex_);
    effect = course_.effect();
    decided = reached ? course_.reach(Stage::going) : course_.open();
  }
  if (reached && decided) {
    sayControl(NoticeType::left, nullptr, 0, within(kPartingBound),
               effect);  // or it learns it by the connection's end
    switchTo(next);
    return;
  }
  if (next.connection != nullptr) next.connection->close();
  beside_ = nullptr;
  if (!decided) return;  // the worker said first that the session stays, or the program ends
  GPUPOOL_INFO("the session stays with its worker: %s", why.c_str());
  const bool said = sayControl(NoticeType::stays, nullptr, 0, within(kPartingBound), effect);
  if (!said || connection_->peer() != Peer::alive)
    tellReason("the session's worker is gone, and it could not go on at the next one: " + why +
               "; start the program again");
  std::lock_guard lock(moveMutex_);
  course_.fails();
}

// ---- the new worker ----

std::unique_ptr<transport::Connection> Session::dial(uint32_t epoch, bool& given, std::string& why) {
  if (dial_) return dial_(epoch, given, why);
  OpenedSession opened;
  // The holder bounds how long a session that is nowhere is waited for: as long as it has the lease.
  const bool held = isHeld();
  const std::string over(isApart() ? transportWith(TransportFacts::Reach::anyHost).name : transport_);
  const NextEpoch wish{sessionHigh_, sessionLow_, epoch, over, held, serverLost_, mayShare()};
  const CUresult status = openNextEpoch(
      holder_, schema::rowsHash(), wish, opened, owedReplies_, held ? kForLong : kReachBound,
      [this] { return moveIsOver(); }, why);
  if (status != CUDA_SUCCESS) return nullptr;
  given = true;
  CUresult ignored = CUDA_SUCCESS;
  auto reached = connect(opened.reply.transport, opened.bootstrap, opened.reply.networkDevice, ignored, why);
  if (reached == nullptr && over != opened.reply.transport) sharesNoMore_ = true;
  return reached;
}

bool Session::mayShare() const {
  const bool turn = !sharesInTurns_ || moves_ % 2 == 1;
  if ((mapsMemory_ && !isApart()) || log_ != nullptr || transportNamed_ || sharesNoMore_ || !turn)
    return false;
  std::lock_guard lock(moveMutex_);
  return course_.mayShare();
}

// A server, or worker, that dies before it has greeted has nothing of the session: another one begins it. The
// holder bounds how long one is waited for (--protect-wait); its own end ends the wait.
bool Session::reachFirst(OpenedSession opened, const Accepts& accepts, CUresult& status, std::string& text) {
  constexpr unsigned kMostServers = 4;
  for (unsigned tries = kMostServers; tries != 0; --tries) {
    auto connection = connect(transport_, opened.bootstrap, opened.reply.networkDevice, status, text);
    bool lost = connection == nullptr && status == CUDA_ERROR_DEVICE_UNAVAILABLE && holderKeeps_;
    bool server = true;
    if (connection != nullptr) {
      mapsMemory_ = connection->mapsMemory();
      use(std::move(connection));
      if (greet(accepts, status, text)) return true;
      lost = hello_ == nullptr && mayGoOver(*connection_);
      server = !isFailover(connection_->reason());
    }
    if (!lost || log_ == nullptr) return false;
    GPUPOOL_INFO("the session was lost before it began: %s", text.c_str());
    const NextEpoch wish{sessionHigh_, sessionLow_, epoch_ + 1, transport_, true, server};
    opened = OpenedSession();
    status = openNextEpoch(
        holder_, schema::rowsHash(), wish, opened, owedReplies_, kForLong, [] { return false; }, text);
    if (status != CUDA_SUCCESS) return false;
    ++epoch_;
    server_ = opened.reply.server;
  }
  return false;
}

// As a session of a later epoch it is told what pinned memory it has: none.
bool Session::passRegions(std::string& text) {
  bool over = false;
  for (transport::TimeLeft time(kReachBound); !over && time.any();)
    if (!connection_->next(Channel::call, transport::Clock::now() + time.step(), over).empty()) return true;
  text = "the worker did not greet: " + connection_->reason();
  return false;
}

bool Session::reachNext(NextWorker& next, std::string& why) {
  if (findNext(next, why)) return true;
  if (next.lends && !moveIsOver()) sharesNoMore_ = true;  // the next try goes over a network
  return false;
}

bool Session::findNext(NextWorker& next, std::string& why) {
  {
    std::lock_guard lock(moveMutex_);
    next.epoch = course_.epoch();
  }
  if (!next.replaces && next.epoch != epoch_ + 1) {
    why = "the worker named epoch " + std::to_string(next.epoch) + " behind " + std::to_string(epoch_);
    return false;
  }
  next.connection = dial(next.epoch, next.given, why);
  if (next.connection == nullptr) return false;
  beside_ = next.connection.get();
  const bool shares = next.connection->mapsMemory();
  next.lends = shares && mayShare();
  if (!next.lends && shares != (mapsMemory_ && !isApart())) {
    why = "the new worker is reached in another way than it should be";
    return false;
  }
  if (!greetNext(next, why)) return false;
  const MoveHooks* hooks = moveHooks_;
  if (next.replaces) return hooks == nullptr || hooks->lend(*next.connection, why);
  if (hooks != nullptr && !hooks->prepare(*next.connection, next.regions, next.lends, why)) return false;
  return !next.lends || (lendPinned(next, why) && mapNext(next, why));
}

// What it writes its words into, and where copies pass through.
bool Session::mapNext(NextWorker& next, std::string& why) const {
  const auto map = [&](const schema::RegionName& name, size_t bytes) {
    auto memory = next.connection->map({name.id, name.generation}, nullptr, within(kReachBound));
    return memory != nullptr && memory->size() >= bytes ? memory : nullptr;
  };
  next.words = map(next.hello.words, schema::kWordsBytes);
  next.staging = map(next.hello.staging, next.hello.stagingBytes);
  if (next.words != nullptr && next.staging != nullptr) return true;
  why = "the new worker's memory cannot be mapped: " + next.connection->reason();
  return false;
}

// From here on the new worker has the program's own pages; that one may still not get the session.
bool Session::lendPinned(NextWorker& next, std::string& why) const {
  const MoveHooks* hooks = moveHooks_;
  std::vector<schema::MovedRegion> lent(std::max<size_t>(next.regions.size(), 1));
  for (size_t i = 0; i < next.regions.size(); ++i) {
    transport::Region region;
    uint64_t offset = 0;
    lent[i].address = next.regions[i].address;
    if (hooks == nullptr || !hooks->lent(lent[i].address, region, offset)) {
      why = "pinned memory is not there any more";
      return false;
    }
    lent[i].region = {region.id, region.generation};
  }
  const size_t bytes = lent.size() * sizeof lent[0];
  std::byte* room = next.connection->reserve(Channel::call, bytes, within(kReachBound));
  if (room == nullptr) {
    why = "the new worker takes no pinned memory, or it is in too many pieces";
    return false;
  }
  std::memcpy(room, lent.data(), bytes);
  next.connection->commit(Channel::call, bytes);
  if (!readRegions(next, next.regions.size(), why)) return false;
  std::map<uint64_t, transport::Region> pinned;
  for (const schema::MovedRegion& region : next.regions)
    pinned[region.address] = {region.region.id, region.region.generation};
  return hooks == nullptr || hooks->arrive(pinned, why);
}

bool Session::greetNext(NextWorker& next, std::string& why) const {
  const auto answer = exchangeHellos(
      *next.connection, next.epoch, 1u << hello_->space, next.lends, [this] { return moveIsOver(); }, why);
  if (answer.empty()) return false;
  CUresult ignored = CUDA_SUCCESS;
  if (!acceptHello(answer, next.hello, ignored, why) || !fits(*hello_, next.hello, why)) return false;
  if (next.hello.epoch != next.epoch) {
    why = "the new worker greets as epoch " + std::to_string(next.hello.epoch);
    return false;
  }
  const MoveHooks* hooks = moveHooks_;
  return readRegions(next, hooks == nullptr ? 0 : hooks->regions(), why);
}

bool Session::readRegions(NextWorker& next, size_t expected, std::string& why) const {
  std::span<const std::byte> list;
  bool over = false;
  for (transport::TimeLeft time(kReachBound); list.empty() && !over && !moveIsOver() && time.any();)
    list = next.connection->next(Channel::call, within(kStayLook), over);
  if (next.replaces) {  // the pinned memory that there was at the checkpoint
    expected = list.size() / sizeof(schema::MovedRegion);
    schema::MovedRegion first;
    if (list.size() == sizeof first) std::memcpy(&first, list.data(), sizeof first);
    if (expected == 1 && first.address == 0) expected = 0;
  }
  if (list.empty() && !next.connection->reason().empty()) {
    why = "the new worker does not name pinned memory: " + next.connection->reason();
    return false;
  }
  // No message is empty: where there is no pinned memory, one region has address 0.
  next.regions.resize(std::max<size_t>(expected, 1));
  if (list.size() != next.regions.size() * sizeof(schema::MovedRegion)) {
    why = "the new worker names " + std::to_string(list.size() / sizeof(schema::MovedRegion)) + " of " +
          std::to_string(expected) + " regions of pinned memory";
    return false;
  }
  std::memcpy(next.regions.data(), list.data(), list.size());
  if (expected != 0) return true;
  if (next.regions[0].address != 0) why = "the new worker names pinned memory that the session does not have";
  next.regions.clear();
  return why.empty();
}

// The program keeps the devices that it has seen: they must be like the new ones in all that it may rely on.
bool Session::fits(const schema::WorkerHello& now, const schema::WorkerHello& next, std::string& why) {
  if (next.deviceCount != now.deviceCount || next.softwareDriver != now.softwareDriver) {
    why = "the new worker has other devices";
    return false;
  }
  if (next.space != now.space || next.stagingBytes != now.stagingBytes) {
    why = "the new worker keeps the session's memory elsewhere";
    return false;
  }
  for (uint32_t d = 0; d < now.deviceCount; ++d) {
    const schema::DeviceProperties &old = now.devices[d], &fresh = next.devices[d];
    if (std::strcmp(old.name, fresh.name) != 0) {
      why = "device " + std::to_string(d) + " is a " + old.name + ", and at the new worker a " + fresh.name;
      return false;
    }
    for (int a = 0; a < schema::kDeviceAttributes; ++a)
      if (!belongsToOne(a) && (old.attributeKnown[a] != fresh.attributeKnown[a] ||
                               (old.attributeKnown[a] != 0 && old.attributes[a] != fresh.attributes[a]))) {
        why = "device " + std::to_string(d) + " has another attribute " + std::to_string(a) +
              " at the new worker: " + std::to_string(fresh.attributes[a]) + " instead of " +
              std::to_string(old.attributes[a]);
        return false;
      }
  }
  return true;
}

// The old worker writes no word any more.
void Session::leaveShared(const transport::Connection& next) {
  transport_ = next.name();
  mapsMemory_.store(false, std::memory_order_release);
  if (words_->leaveShared()) return;
  tellReason("there is no memory to go on without the worker's; start the program again");
  words_->setSticky(CUDA_ERROR_DEVICE_UNAVAILABLE);
}

// The new worker writes words that nobody has told here.
void Session::enterShared(const NextWorker& next) {
  transport_ = next.connection->name();
  if (!words_->enterShared(next.words)) {
    tellReason("the new worker's completion words cannot be mapped; start the program again");
    words_->setSticky(CUDA_ERROR_DEVICE_UNAVAILABLE);
    return;
  }
  mapsMemory_.store(true, std::memory_order_release);
}

// Under both channels' locks, and with nobody inside transfers_. Nobody reads replies, for none is awaited.
void Session::switchTo(NextWorker& next) {
  const auto old = link();
  const auto traffic = old->traffic();
  if (log_ != nullptr)
    log_->relocate(hello_->stagingAddress, next.hello.stagingAddress, next.hello.stagingBytes);
  logTold_ = {};  // the next worker has not heard of it
  logToldAt_ = {};
  epoch_ = next.epoch;
  hello_->words = next.hello.words;
  hello_->staging = next.hello.staging;
  hello_->stagingAddress = next.hello.stagingAddress;
  if (next.lends)
    enterShared(next);
  else if (mapsMemory_ && !next.connection->mapsMemory())
    leaveShared(*next.connection);
  if (const MoveHooks* hooks = moveHooks_) hooks->finish(std::move(next.staging));
  beside_ = old.get();
  use(next.connection);
  {
    std::lock_guard lock(linkMutex_);
    earlierTraffic_.copiedBytes += traffic.copiedBytes;
    earlierTraffic_.movedBytes += traffic.movedBytes;
  }
  ++moves_;
  setStill(kSuspended, false);  // what the old worker said of itself
  {
    std::lock_guard lock(moveMutex_);  // the service thread goes over
    course_.arrive();
    moveChanged_.notify_all();
  }
  old->close();
  repeatWatches();
  words_->ring();     // who sleeps looks again
  beside_ = nullptr;  // before the last user of it drops it
  if (closing_) next.connection->close();
}

// ---- watches ----

void Session::sweepWatches() {
  std::erase_if(watches_, [&](const auto& known) { return words_->reached(known.index, known.value); });
  sweepWatches_ = std::max<size_t>(64, 2 * watches_.size());
}

void Session::noteWatch(schema::WordUpdate watch) {
  if (watches_.size() >= sweepWatches_) sweepWatches();
  watches_.push_back(watch);
}

void Session::repeatWatches() {
  sweepWatches();
  for (const schema::WordUpdate& watch : watches_)
    if (!sayControl(NoticeType::watch, &watch, sizeof watch, transport::kForever)) return;
}

}  // namespace gpupool::client

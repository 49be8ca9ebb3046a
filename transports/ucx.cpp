#include "transports/ucx.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/log.h"
#include "transports/implementations.h"
#include "transports/network_address.h"

namespace gpupool::transport {

namespace {

constexpr std::chrono::seconds kAnnouncementBound{2};
// The peer refuses to serve more at once (kMaxServing); put and get wait for earlier ones.
constexpr size_t kMostTransfers = 1 << 12;
constexpr size_t kRememberedFailures = 1024;

}  // namespace

// --- transfers ---

Transfer TransferTable::begin() {
  std::unique_lock lock(mutex_);
  while (running_.size() >= kMostTransfers && !refusing_) changed_.wait_for(lock, kLongestSleep);
  if (refusing_) return kRefused;
  running_.insert(running_.end(), next_);
  return next_++;
}

void TransferTable::end(Transfer transfer, bool ok) {
  {
    std::lock_guard lock(mutex_);
    running_.erase(transfer);
    if (!ok) failed_.insert(transfer);
    if (failed_.size() > kRememberedFailures) failed_.erase(failed_.begin());
  }
  changed_.notify_all();
}

bool TransferTable::wait(Transfer transfer, Deadline deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!running_.count(transfer)) return transfer < next_ && !failed_.count(transfer);
    Clock::time_point now = Clock::now();
    if (stopped_ || now >= deadline) return false;
    changed_.wait_until(lock, std::min(deadline, now + kLongestSleep));
  }
}

void TransferTable::refuse() {
  {
    std::lock_guard lock(mutex_);
    refusing_ = true;
  }
  changed_.notify_all();
}

void TransferTable::stop() {
  {
    std::lock_guard lock(mutex_);
    refusing_ = stopped_ = true;
  }
  changed_.notify_all();
}

// --- any thread ---

Ucx::Ucx(int bootstrap, const Options& options, bool worker)
    : isWorker_(worker),
      bootstrap_(bootstrap),
      options_(options),
      event_(newEvent()),
      transfers_(std::make_unique<TransferTable>()) {
  UcxGreeting greeting;
  RingMemory::Sizes sizes = RingMemory::sizes(options);
  greeting.callBytes = sizes.ring[0];
  greeting.controlBytes = sizes.ring[1];
  link_ =
      worker ? UcxLink::accept(bootstrap, options, greeting) : UcxLink::connect(bootstrap, options, greeting);
  registered_ = link_->registered();
  options_.callBytes = greeting.callBytes;  // the worker's sizes hold for both sides
  options_.controlBytes = greeting.controlBytes;
  makeLanes();
  // Counted from the first repetition (after 200 ms or more) of the next sign of life, by coarse timers. Less
  // would cost repetitions: they come after 0.2, 0.6, 1.4 s, and a network back before the last is forgiven.
  limitSilence(bootstrap, options.peerTimeout * 7 / 10);
  lastSaid_ = lastHeard_ = Clock::now();
  link_->setSink(this);
  TimeLeft time(options.setupTimeout);
  worker ? link_->awaitReady(bootstrap, time) : UcxLink::sayReady(bootstrap, time);
  progress_ = startQuietThread([this] { run(); });
}

Ucx::Ucx(std::unique_ptr<UcxLink> link, const Options& options, bool worker)
    : isWorker_(worker),
      options_(options),
      event_(newEvent()),
      transfers_(std::make_unique<TransferTable>()),
      registered_(link->registered()),
      link_(std::move(link)) {
  makeLanes();
}

void Ucx::makeLanes() {
  RingMemory::Sizes sizes = RingMemory::sizes(options_);
  auto backing = SharedMemory::create(RingMemory::totalBytes(sizes));
  bool expedited = expeditedBarrier();
  attach(std::make_shared<RingMemory>(backing->descriptor(), sizes), 0, kChannels, expedited);
  for (int channel = 0; channel < kChannels; ++channel) {
    Lane& lane = lanes_[channel];
    int in = kChannels + channel;
    lane.size = memory_->size(channel);
    lane.drain =
        std::make_unique<RingConsumer>(memory_->words(channel), memory_->data(channel), lane.size, expedited);
    lane.fill = std::make_unique<RingProducer>(memory_->words(in), memory_->data(in), lane.size, expedited);
  }
}

Ucx::~Ucx() {
  if (abandoned_) {
    [[maybe_unused]] UcxLink* leaked = link_.release();
    return;
  }
  if (progress_ == nullptr) return;
  close();
  progress_->join();
}

void Ucx::wakeProgress() {
  if (progressArmed_.exchange(0, std::memory_order_seq_cst)) signalEvent(event_);
}

void Ucx::wakeReader(Channel channel) {
  out_[index(channel)]->words()->consumerArmed.store(0, std::memory_order_relaxed);
  signalEvent(event_);
}

void Ucx::consumed(Channel channel) {
  int i = index(channel);
  uint64_t unsaid = in_[i]->position() - creditSaid_[i].load(std::memory_order_relaxed);
  if (unsaid < memory_->size(i) / 4 || work_.load(std::memory_order_relaxed)) return;
  work_.store(true, std::memory_order_seq_cst);
  wakeProgress();
}

void Ucx::gone() {
  transfers_->refuse();
  work_.store(true, std::memory_order_seq_cst);
  wakeProgress();
}

Transfer Ucx::submit(Request request) {
  Transfer transfer = request.transfer;
  {
    std::lock_guard lock(requestsMutex_);
    if (isPut(request.header.kind)) {
      PutMark mark{putsAsked_.load(std::memory_order_relaxed) + 1, {}};
      for (int channel = 0; channel < kChannels; ++channel)
        mark.position[channel] = out_[channel]->words()->tail.load(std::memory_order_acquire);
      marks_.push_back(mark);
      request.header.number = mark.number;
      putsAsked_.store(mark.number, std::memory_order_release);
    }
    requests_.push_back(std::move(request));
  }
  work_.store(true, std::memory_order_seq_cst);
  wakeProgress();
  return transfer;
}

Region Ucx::share(std::shared_ptr<SharedMemory> memory) {
  if (!open()) return {};
  std::lock_guard order(sharingMutex_);
  Region region = local_.add(memory);
  if (region == Region{}) return {};
  Request request{.header = {.kind = WireKind::region, .region = region, .length = memory->size()}};
  if (registered_) registerShared(region, memory, request);
  submit(std::move(request));
  return region;
}

void Ucx::unshare(Region region) {
  std::lock_guard order(sharingMutex_);
  if (closedHere() || !local_.remove(region)) return;
  if (registered_) forgetShared(region);
  submit({.header = {.kind = WireKind::withdraw, .region = region}});
}

Transfer Ucx::put(const void* local, Region remote, uint64_t offset, size_t bytes) {
  if (!open()) return kRefused;
  auto entry = remote_->wait(remote, Clock::now() + kAnnouncementBound);
  if (!entry || !within(entry->size, offset, bytes)) return kRefused;
  if (bytes == 0) return 0;
  Transfer transfer = transfers_->begin();
  if (transfer == kRefused) return transfer;
  WireHeader header{.kind = WireKind::put, .region = remote, .offset = offset, .length = bytes};
  Request request{.header = header, .source = local, .transfer = transfer};
  if (oneSided(bytes)) pointTo(request, WireKind::fetch, local);
  return submit(std::move(request));
}

Transfer Ucx::get(void* local, Region remote, uint64_t offset, size_t bytes) {
  if (!open()) return kRefused;
  auto entry = remote_->wait(remote, Clock::now() + kAnnouncementBound);
  if (!entry || !within(entry->size, offset, bytes)) return kRefused;
  if (bytes == 0) return 0;
  Transfer transfer = transfers_->begin();
  if (transfer == kRefused) return transfer;
  WireHeader header{.kind = WireKind::get, .region = remote, .offset = offset, .length = bytes};
  Request request{.header = header, .target = local, .transfer = transfer};
  if (oneSided(bytes)) pointTo(request, WireKind::fill, local);
  return submit(std::move(request));
}

bool Ucx::wait(Transfer transfer, Deadline deadline) {
  if (transfer == 0) return true;
  if (transfer == kRefused || abandoned_) return false;
  return transfers_->wait(transfer, deadline);
}

void Ucx::close() {
  if (abandoned_) return;
  bool first = closeHere();
  closing_.store(true, std::memory_order_seq_cst);
  work_.store(true, std::memory_order_seq_cst);
  wakeProgress();
  {
    std::unique_lock lock(endMutex_);
    ended_.wait(lock, [&] { return runEnded_; });  // bounded (ucx_progress.cpp), as is UCX's own end
  }
  if (first) markGone(Peer::closed, "this side closed the connection");
  local_.clear();
}

void Ucx::sever() {
  lose("the wire was cut");
  severed_.store(true);
  ::shutdown(bootstrap_.get(), SHUT_RDWR);
}

void Ucx::abandon() {
  abandoned_ = true;
  if (registered_) registered_->abandon();
  [[maybe_unused]] auto* leaked = peerRegions_.release();  // keys belong to the parent's queue pair
  forget();
  [[maybe_unused]] std::thread* thread = progress_.release();  // it does not exist in this process
  [[maybe_unused]] TransferTable* table = transfers_.release();
  bootstrap_.reset();
  event_.reset();
}

std::unique_ptr<Connection> acceptUcx(int bootstrap, const Options& options) {
  return std::make_unique<Ucx>(bootstrap, options, true);
}

std::unique_ptr<Connection> connectUcx(int bootstrap, const Options& options) {
  return std::make_unique<Ucx>(bootstrap, options, false);
}

void loadUcx() { UcxLink::load(); }

}  // namespace gpupool::transport

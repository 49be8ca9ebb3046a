#include "client/session.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "base/log.h"
#include "base/reserve.h"
#include "base/signals.h"
#include "base/write_all.h"
#include "client/holder.h"
#include "client/order_lock.h"
#include "client/process.h"
#include "schema/pci_bus_id.h"
#include "transports/last_words.h"
#include "transports/waiting.h"

namespace gpupool::client {

using schema::Notice;
using schema::NoticeType;
using transport::Channel;
using transport::Peer;

Session* Session::current = nullptr;

namespace {

constexpr uint64_t kMostStaging = uint64_t{1} << 30;  // that a worker may claim

// How long a worker that does nothing is borne: as the holder says. A process has one session.
struct Patience {
  std::chrono::milliseconds stalled{30'000}, setup{10'000}, protectedSilence{30'000};
  void set(uint32_t stallMs, uint32_t silenceMs) {
    constexpr std::chrono::hours kForEver{24 * 365};
    stalled = stallMs != 0 ? std::chrono::milliseconds(stallMs) : std::chrono::milliseconds(kForEver);
    setup = std::clamp<std::chrono::milliseconds>(stalled, std::chrono::seconds(1), setup);
    protectedSilence = silenceMs != 0 ? std::min(stalled, std::chrono::milliseconds(silenceMs)) : stalled;
  }
} patience;

transport::Deadline soon(std::chrono::milliseconds wait) { return transport::Clock::now() + wait; }

// Its devices have the pool's PCI addresses, for as long as the program lives (schema/pci_bus_id.h).
void nameInThePool(schema::WorkerHello& hello, const std::string& server) {
  for (uint32_t d = 0; d < hello.deviceCount; ++d) {
    schema::DeviceProperties& device = hello.devices[d];
    schema::PciAddress real;
    if (!schema::readPciAddress(device.pciBusId, real)) continue;
    const schema::PciAddress address = schema::poolAddress(server, real);
    std::snprintf(device.pciBusId, sizeof device.pciBusId, "%s", schema::pciText(address).c_str());
    device.attributes[CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID] = static_cast<int32_t>(address.domain);
  }
}

bool isFree(uint64_t address, uint64_t bytes) {
  if (!reserveAt(address, bytes)) return false;
  munmap(reinterpret_cast<void*>(address), bytes);
  return true;
}

// The session's addresses: all of them or none, and none once it goes unless they are kept.
class ReservedSpace {
 public:
  explicit ReservedSpace(const schema::AddressSpace& space)
      : ranges_{{{space.deviceBase, space.windowBytes * schema::kMaxDevices},
                 {space.hostBase, space.hostBytes}}} {
    while (reserved_ < ranges_.size() && reserveAt(ranges_[reserved_].first, ranges_[reserved_].second))
      ++reserved_;
    if (reserved_ != ranges_.size()) release();
  }
  ~ReservedSpace() { release(); }
  ReservedSpace(const ReservedSpace&) = delete;
  ReservedSpace& operator=(const ReservedSpace&) = delete;
  explicit operator bool() const { return reserved_ != 0; }
  void keep() { reserved_ = 0; }

 private:
  void release() {
    for (; reserved_ != 0; --reserved_)
      munmap(reinterpret_cast<void*>(ranges_[reserved_ - 1].first), ranges_[reserved_ - 1].second);
  }
  std::array<std::pair<uint64_t, uint64_t>, 2> ranges_;
  size_t reserved_ = 0;
};

std::string whySilent(const transport::Connection& connection, std::chrono::milliseconds bound) {
  const std::string reason = connection.reason();
  return !reason.empty() ? reason : "nothing came within " + std::to_string(bound.count()) + " ms";
}

}  // namespace

uint32_t Session::freeSpaces() {
  uint32_t free = 0;
  for (int i = 0; i < schema::kMaxSpaces; ++i) {
    const schema::AddressSpace& space = schema::kSpaces[i];
    if (isFree(space.deviceBase, space.windowBytes * schema::kMaxDevices) &&
        isFree(space.hostBase, space.hostBytes))
      free |= 1u << i;
  }
  return free;
}

Session* Session::open(const Accepts& accepts, CUresult& status, std::string& text) {
  auto* session = new Session;
  OpenedSession opened;
  status = openSession(schema::rowsHash(), opened, text);
  if (status == CUDA_SUCCESS) {
    session->holder_ = opened.holder;
    session->transport_ = opened.reply.transport;
    session->server_ = opened.reply.server;
    session->sessionHigh_ = opened.reply.sessionHigh;
    session->sessionLow_ = opened.reply.sessionLow;
    session->epoch_ = static_cast<uint32_t>(opened.reply.epoch);
    const char* named = std::getenv("GPUPOOL_TRANSPORT");
    session->transportNamed_ = named != nullptr && *named != 0;
    const char* shares = std::getenv("GPUPOOL_DISTURB_SHARING");  // tests
    session->sharesNoMore_ = shares != nullptr && std::strcmp(shares, "never") == 0;
    session->sharesInTurns_ = shares != nullptr && std::strcmp(shares, "in-turns") == 0;
    patience.set(opened.reply.stallMs, opened.reply.keeps != 0 ? opened.reply.silenceMs : 0);
    if (opened.reply.logFrameBytes != 0)
      session->log_ = std::make_unique<CallLog>(
          CallLog::Limits{opened.reply.logFrameBytes, opened.reply.logPayloadBytes});
    if (session->log_ != nullptr) session->log_->cut(0, 0);  // until it has a checkpoint, it may begin anew
    session->goesOnDifferent_ = opened.reply.goOnDifferent != 0;
    session->holderKeeps_ = opened.reply.keeps != 0;
    if (session->reachFirst(opened, accepts, status, text)) {
      current = session;
      return session;
    }
  }
  if (session->holder_ >= 0) close(session->holder_);
  delete session;
  return nullptr;
}

std::unique_ptr<transport::Connection> Session::connect(const std::string& transport, int bootstrap,
                                                        const std::string& networkDevice, CUresult& status,
                                                        std::string& text) const {
  status = CUDA_ERROR_DEVICE_UNAVAILABLE;
  transport::Options options;
  options.networkDevice = networkDevice;
  options.stallTimeout = silenceBorne();
  options.setupTimeout = setupBorne();
  try {
    SignalsBlocked blocked;
    return transport::connect(transport, bootstrap, options);
  } catch (const std::exception& e) {
    if (dynamic_cast<const transport::ShortOfMemory*>(&e) != nullptr) status = CUDA_ERROR_OUT_OF_MEMORY;
    text = std::string("cannot connect to the worker: ") + e.what();
    return nullptr;
  }
}

void Session::use(std::shared_ptr<transport::Connection> connection) {
  std::lock_guard lock(linkMutex_);
  inUse_ = connection.get();
  connection_ = std::move(connection);
}

std::shared_ptr<transport::Connection> Session::link() const {
  std::lock_guard lock(linkMutex_);
  return connection_;
}

bool Session::acceptHello(std::span<const std::byte> answer, schema::WorkerHello& hello, CUresult& status,
                          std::string& text) {
  if (answer.size() != sizeof hello) {
    text = "the worker did not greet: wrong size of its greeting";
    return false;
  }
  std::memcpy(&hello, answer.data(), sizeof hello);
  hello.text[sizeof hello.text - 1] = 0;
  bool sane = hello.magic == schema::kWorkerMagic && hello.deviceCount <= schema::kMaxDevices &&
              hello.space < schema::kMaxSpaces && hello.stagingBytes <= kMostStaging;
  for (schema::DeviceProperties& device : hello.devices) {
    device.name[sizeof device.name - 1] = 0;
    device.pciBusId[sizeof device.pciBusId - 1] = 0;
  }
  if (!sane || hello.status != CUDA_SUCCESS) {
    text = sane ? hello.text : "the worker's greeting is not gpupool's";
    if (sane) status = static_cast<CUresult>(hello.status);
    return false;
  }
  return true;
}

std::span<const std::byte> Session::exchangeHellos(transport::Connection& connection, uint32_t epoch,
                                                   uint32_t spaces, bool lends,
                                                   const std::function<bool()>& cancelled,
                                                   std::string& text) const {
  schema::ClientHello mine;
  mine.protocol = schema::kProtocolVersion;
  mine.rowsHash = schema::rowsHash();
  mine.epoch = epoch;
  mine.spaces = spaces;
  mine.lends = lends ? 1 : 0;
  if (hello_ != nullptr) mine.contextAhead = hello_->contextAhead;
  std::byte* room = connection.reserve(Channel::call, sizeof mine, soon(kTick));
  if (room != nullptr) {
    std::memcpy(room, &mine, sizeof mine);
    connection.commit(Channel::call, sizeof mine);
  }
  std::span<const std::byte> answer;
  bool over = false;
  const auto bound = setupBorne();
  for (transport::TimeLeft time(bound); answer.empty() && !over && !cancelled() && time.any();)
    answer = connection.next(Channel::call, transport::Clock::now() + time.step(), over);
  if (answer.empty()) text = "the worker did not greet: " + whySilent(connection, bound);
  return answer;
}

bool Session::greet(const Accepts& accepts, CUresult& status, std::string& text) {
  status = CUDA_ERROR_DEVICE_UNAVAILABLE;
  const auto answer = exchangeHellos(*connection_, epoch_, freeSpaces(), false, [] { return false; }, text);
  if (answer.empty()) return false;
  hello_ = std::make_unique<schema::WorkerHello>();
  if (!acceptHello(answer, *hello_, status, text)) return false;
  if ((status = accepts(*hello_)) != CUDA_SUCCESS) return false;
  status = CUDA_ERROR_DEVICE_UNAVAILABLE;
  if (epoch_ != 1 && !passRegions(text)) return false;
  nameInThePool(*hello_, server_);
  ReservedSpace reserved(space());
  if (!reserved) {
    text = "the application mapped memory where the session's was to lie, while it was opened";
    return false;
  }
  std::shared_ptr<transport::SharedMemory> page;
  if (mapsMemory_)
    page = connection_->map({hello_->words.id, hello_->words.generation}, nullptr, soon(patience.setup));
  if (mapsMemory_ && page == nullptr) {
    text = "the worker's completion words did not arrive: " + whySilent(*connection_, patience.setup);
    return false;
  }
  if (page != nullptr && page->size() < schema::kWordsBytes) {
    text = "the worker's completion words are fewer than they must be";
    return false;
  }
  words_ = std::make_unique<Words>(page);
  if (const char* sync = std::getenv("GPUPOOL_SYNC"); sync != nullptr && *sync == '1') forced_ = 1;
  if (const char* stats = std::getenv("GPUPOOL_STATS"); stats != nullptr && *stats == '1') statsOn_ = true;
  SignalsBlocked blocked;
  service_ = std::thread([this] { serviceLoop(); });
  service_.detach();
  reserved.keep();
  status = CUDA_SUCCESS;
  return true;
}

// ---- sending ----

uint32_t Session::lane() {
  static std::atomic<uint32_t> next{1};
  static thread_local uint32_t mine __attribute__((tls_model("initial-exec"))) = 0;
  if (__builtin_expect(mine == 0, 0)) mine = next.fetch_add(1);
  return mine;
}

bool Session::isFault(CUresult status) {
  switch (status) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
      return true;
    default:
      return false;
  }
}

// Waits for room as long as the worker lives: back-pressure, as a full native queue would be.
std::byte* Session::reserve(size_t bytes, Channel channel) {
  // The clock is read only when there is no room.
  if (std::byte* room = connection_->reserve(channel, bytes, transport::Deadline::min())) return room;
  if (bytes > connection_->maxMessage(channel)) return nullptr;
  while (true) {
    if (std::byte* room = connection_->reserve(channel, bytes, soon(kTick))) return room;
    if (connection_->peer() != Peer::alive || closing_) return nullptr;
  }
}

// A server that is only slow costs a program that can go on elsewhere little, and any other program its life.
// From its first call on it can: without a checkpoint it begins anew.
std::chrono::milliseconds Session::silenceBorne() const {
  const bool goesOn = holderKeeps_ && log_ != nullptr && log_->state().obstacle.empty();
  return goesOn ? patience.protectedSilence : patience.stalled;
}

// What is in files, and nowhere else, has no way back from a worker that is slow to greet. A protected
// session may have yet another worker.
std::chrono::milliseconds Session::setupBorne() const {
  return isHeld() && log_ == nullptr ? std::max(patience.setup, patience.stalled) : patience.setup;
}

CUresult Session::lost() {
  if (closing_) return CUDA_ERROR_DEINITIALIZED;
  if (link()->peer() == Peer::alive) return CUDA_ERROR_INVALID_VALUE;  // longer than a message can be
  awaitReason();  // what the worker said last may not be read yet
  tellGone();
  return sticky();
}

void Session::tellGone() {
  const CUresult before = words_->sticky();
  const std::string reason = link()->reason();
  if (before == CUDA_SUCCESS || before == CUDA_ERROR_DEVICE_UNAVAILABLE)
    tellReason(isFailover(reason)
                   ? "the GPU server's worker has died (" + transport::plainWords(reason) +
                         "), and the program cannot go on from its checkpoint; start the program again"
                   : "the GPU server is gone: " + transport::plainWords(reason) +
                         "; start the program again");
  words_->setSticky(CUDA_ERROR_DEVICE_UNAVAILABLE);
  reasonAwaited_ = true;
}

// What takes both sides fails a moment before the other is known to be gone.
bool Session::provesGone(const transport::Connection& connection) {
  constexpr auto kBound = std::chrono::seconds(1);
  for (transport::TimeLeft time(kBound); connection.peer() == Peer::alive && time.any();)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return connection.peer() != Peer::alive;
}

CUresult Session::shareFailed() { return provesGone(*link()) ? lost() : CUDA_ERROR_OUT_OF_MEMORY; }

CUresult Session::transferFailed() {
  if (provesGone(*link())) return lost();
  tellReason("the GPU server refused a transfer of data; start the program again");
  return CUDA_ERROR_DEVICE_UNAVAILABLE;
}

void Session::tellReason(std::string_view text) {
  std::lock_guard lock(reasonMutex_);  // said once, and before anybody goes on
  if (reasonTold_) return;
  GPUPOOL_ERROR("%.*s", static_cast<int>(text.size()), text.data());
  reasonTold_ = true;
}

void Session::awaitReason() const {
  constexpr auto kBound = std::chrono::seconds(1);  // on its way, or its sender is dead, which tells as well
  for (transport::TimeLeft time(kBound); !reasonTold_ && !reasonAwaited_ && time.any();)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  reasonAwaited_ = true;  // once; should it come after all, it is still said
}

void Session::addWaiter(Waiter* waiter) {
  std::lock_guard lock(replyMutex_);
  waiters_[waiter->seq] = waiter;
}

// One waiting thread reads for all; the others sleep until theirs was delivered or the reader leaves.
void Session::await(Waiter& waiter) {
  const OrderLock::Lent lent;
  std::unique_lock lock(replyMutex_);
  while (!waiter.done) {
    if (lost_) {
      waiters_.erase(waiter.seq);
      waiter.status = sticky() != CUDA_SUCCESS ? sticky() : CUDA_ERROR_DEVICE_UNAVAILABLE;
      return;
    }
    if (const auto gone = log_ != nullptr ? link() : nullptr; gone != nullptr && goesOver(*gone)) {
      lock.unlock();
      awaitFailover(gone);
      lock.lock();
      if (words_->sticky() != CUDA_SUCCESS) lost_ = true;
      continue;
    }
    if (receiving_ || away_) {
      replied_.wait_for(lock, kTick);
      continue;
    }
    readReply(lock);
  }
}

// A move waits until nobody reads and nobody awaits anything, so the connection stays the same meanwhile.
void Session::readReply(std::unique_lock<std::mutex>& lock) {
  receiving_ = true;
  lock.unlock();
  bool over = false;
  auto message = connection_->next(Channel::call, soon(kTick), over);
  lock.lock();
  receiving_ = false;
  if (!message.empty()) {
    deliver(message);
  } else if (over && !goesOver()) {
    lock.unlock();
    lost();
    lock.lock();
    lost_ = true;
  }
  replied_.notify_all();
}

void Session::deliver(std::span<const std::byte> message) {
  schema::Reply header;
  if (message.size() < sizeof header) return;
  std::memcpy(&header, message.data(), sizeof header);
  auto found = waiters_.find(header.seq);
  size_t outputs = message.size() - sizeof header;
  size_t text = std::min<size_t>(schema::padded(header.outputBytes), outputs);
  if (text != 0)
    hearOutput({reinterpret_cast<const char*>(message.data()) + sizeof header + outputs - text,
                std::min<size_t>(header.outputBytes, text)});
  if (header.seq == 0) return;  // output only
  if (log_ != nullptr)
    log_->answered(header.seq, header.status, message.subspan(sizeof header, outputs - text));
  if (isLoss(static_cast<CUresult>(header.status))) awaitLoss();
  if (header.status != CUDA_ERROR_NOT_READY) observed();
  const uint64_t aside = header.seq & ~schema::kAside;
  if (aside == header.seq)
    received_.store(header.seq, std::memory_order_relaxed);
  else if (aside > asidesServed_)  // one after the other: those before it, too
    asidesServed_ = aside;
  if (found == waiters_.end()) return;
  Waiter& waiter = *found->second;
  waiter.status = static_cast<CUresult>(header.status);
  waiter.bytes.assign(message.begin() + sizeof header, message.end() - static_cast<ptrdiff_t>(text));
  waiter.done = true;
  waiters_.erase(found);
}

CUresult Session::waitWord(uint64_t word, uint64_t value, bool sleeps) {
  CUresult status = words_->wait(word, value, sleeps, [&] { watch(word, value); });
  if (isLoss(status)) awaitLoss();
  if (status != CUDA_SUCCESS) sticky();  // what belongs to it comes first
  observed();
  return status;
}

void Session::watch(uint64_t word, uint64_t value) {
  std::lock_guard lock(controlMutex_);
  size_t bytes = sizeof(Notice) + sizeof(schema::WordUpdate);
  noteWatch({word, value});  // of a worker that is gone, the next one may be asked
  std::byte* room = reserve(bytes, Channel::control);
  if (room == nullptr) return;
  Writer out(room, bytes);
  out.value(Notice{NoticeType::watch, epoch_, 0});
  out.value(schema::WordUpdate{word, value});
  connection_->commit(Channel::control, bytes);
}

bool Session::expect(uint64_t word, uint64_t value) {
  std::lock_guard lock(controlMutex_);
  if (watches_.size() >= kMostExpected) sweepWatches();
  if (watches_.size() >= kMostExpected) return false;
  noteWatch({word, value});
  return true;
}

void Session::count(std::string_view name, bool awaited, size_t bytes) {
  (awaited ? awaits_ : posts_).fetch_add(1, std::memory_order_relaxed);
  sentBytes_.fetch_add(bytes, std::memory_order_relaxed);
  if (!awaited) return;
  std::lock_guard lock(statsMutex_);
  ++awaitedByName_[name];
}

void Session::restartStats() {
  std::lock_guard lock(statsMutex_);
  posts_ = awaits_ = sentBytes_ = 0;
  awaitedByName_.clear();
}

void Session::printStats() {
  if (!statsOn_) return;
  std::fprintf(stderr, "gpupool stats: %llu posted, %llu awaited, %llu bytes of frames\n",
               static_cast<unsigned long long>(posts_), static_cast<unsigned long long>(awaits_),
               static_cast<unsigned long long>(sentBytes_));
  if (moves_ != 0)
    std::fprintf(stderr, "gpupool stats: moved to another worker %llu times\n",
                 static_cast<unsigned long long>(moves_));
  auto traffic = link()->traffic();
  {
    std::lock_guard lock(linkMutex_);
    traffic.copiedBytes += earlierTraffic_.copiedBytes;
    traffic.movedBytes += earlierTraffic_.movedBytes;
  }
  if (traffic.copiedBytes + traffic.movedBytes != 0)
    std::fprintf(stderr,
                 "gpupool stats: puts and gets: %llu bytes copied by a processor, %llu moved by RDMA alone\n",
                 static_cast<unsigned long long>(traffic.copiedBytes),
                 static_cast<unsigned long long>(traffic.movedBytes));
  std::lock_guard lock(statsMutex_);
  for (auto& [name, times] : awaitedByName_)
    std::fprintf(stderr, "gpupool stats:   awaited %s %llu\n", std::string(name).c_str(),
                 static_cast<unsigned long long>(times));
}

void Session::goodbye() {
  const bool speaks = leaveMove();
  if (speaks) fetchOutput();
  printStats();
  closing_ = true;  // first: told goodbye, the worker may be gone before this thread goes on
  const auto connection = link();
  if (speaks && connection->peer() == Peer::alive) {
    std::unique_lock lock(controlMutex_, std::defer_lock);
    if (lock.try_lock()) sayControl(NoticeType::goodbye, nullptr, 0, soon(std::chrono::milliseconds(100)));
  }
  words_->setSticky(CUDA_ERROR_DEINITIALIZED);
  connection->close();
}

// Async-signal-safe: no lock, which a thread that does not exist here may hold.
void Session::abandon() {
  for (const auto* one : {&inUse_, &beside_})
    if (transport::Connection* connection = one->load()) connection->abandon();
  if (holder_ >= 0) ::close(holder_);
}

}  // namespace gpupool::client

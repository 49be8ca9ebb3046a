#include "client/memory/carrier.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <thread>

#include "client/memory/copy_threads.h"
#include "client/memory/host.h"
#include "client/memory/pages.h"
#include "transports/descriptor.h"

namespace gpupool::client {
namespace {

constexpr size_t kParallel = size_t{1} << 20;   // from here on several threads copy
constexpr size_t kStreaming = size_t{4} << 20;  // larger than what a cache keeps of it
constexpr size_t kBounce = size_t{1} << 20;     // unguarded memory, and rows, over a network
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr std::chrono::microseconds kNap{20}, kLongNap{1000};

std::byte* bytesAt(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

void copyBytes(uint64_t to, uint64_t from, size_t bytes, bool streaming) {
  const size_t parts = bytes < kParallel ? 1 : CopyThreads::width();
  std::array<CopyThreads::Job, CopyThreads::kMost> jobs;
  const size_t part = (bytes / parts / kPage + 1) * kPage;
  size_t begun = 0;
  for (size_t at = 0; at < bytes; at += part, ++begun) {
    jobs[begun] = {bytesAt(to + at), bytesAt(from + at), std::min(part, bytes - at), streaming};
    copyThreads().start(jobs[begun], parts > 1);
  }
  for (size_t i = 0; i < begun; ++i) copyThreads().finish(jobs[i]);
}

void copyRows(uint64_t to, uint64_t from, const Carrier::Range& range) {
  for (size_t row = 0; row < range.rows; ++row)
    std::memcpy(bytesAt(to + row * range.pitch), bytesAt(from + row * range.pitch), range.bytes);
}

// Memory that may be gone meanwhile: the kernel answers EFAULT where a plain access would end the process.
void readOwn(uint64_t from, void* to, size_t bytes) {
  iovec local{to, bytes}, remote{bytesAt(from), bytes};
  (void)!process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
}
void writeOwn(uint64_t to, const void* from, size_t bytes) {
  iovec local{const_cast<void*>(from), bytes}, remote{bytesAt(to), bytes};
  (void)!process_vm_writev(getpid(), &local, 1, &remote, 1, 0);
}

// One row. False: the session is over.
bool fillRow(const Carrier::Range& range) {
  if (Session::get().mapsMemory()) {
    if (range.unguarded)
      readOwn(range.application, bytesAt(range.shadow), range.bytes);
    else
      copyBytes(range.shadow, range.application, range.bytes, false);
    return true;
  }
  if (!range.unguarded)
    return hostMemory().put(bytesAt(range.application), range.shadow, range.bytes) == CUDA_SUCCESS;
  std::vector<std::byte> bounce(std::min(kBounce, range.bytes));
  for (size_t at = 0; at < range.bytes; at += bounce.size()) {
    const size_t n = std::min(bounce.size(), range.bytes - at);
    readOwn(range.application + at, bounce.data(), n);
    if (hostMemory().put(bounce.data(), range.shadow + at, n, true) != CUDA_SUCCESS) return false;
  }
  return true;
}

// Plain pinned memory. The empty range of a launch's end is none.
bool isOwnShadow(const Carrier::Range& range) {
  return range.bytes != 0 && range.application == range.shadow;
}

// Shared, it is one memory.
bool isThere(const Carrier::Range& range) { return isOwnShadow(range) && Session::get().mapsMemory(); }

bool fillOne(const Carrier::Range& range) {
  if (isThere(range)) return true;
  if (range.rows > 1 && Session::get().mapsMemory()) {
    copyRows(range.shadow, range.application, range);
    return true;
  }
  for (size_t row = 0; row < range.rows; ++row)
    if (!fillRow(range.part(row, 1))) return false;
  return true;
}

bool landRow(const Carrier::Range& range) {
  if (Session::get().mapsMemory()) {
    if (range.unguarded)
      writeOwn(range.application, bytesAt(range.shadow), range.bytes);
    else
      copyBytes(range.application, range.shadow, range.bytes, range.bytes >= kStreaming);
    return true;
  }
  if (!range.unguarded)
    return hostMemory().get(bytesAt(range.application), range.shadow, range.bytes) == CUDA_SUCCESS;
  std::vector<std::byte> bounce(std::min(kBounce, range.bytes));
  for (size_t at = 0; at < range.bytes; at += bounce.size()) {
    const size_t n = std::min(bounce.size(), range.bytes - at);
    if (hostMemory().get(bounce.data(), range.shadow + at, n) != CUDA_SUCCESS) return false;
    writeOwn(range.application + at, bounce.data(), n);
  }
  return true;
}

// A network: one get brings several rows, and what lies between them is left in the bounce.
bool landRows(const Carrier::Range& range) {
  std::vector<std::byte> bounce(range.span());
  if (hostMemory().get(bounce.data(), range.shadow, bounce.size()) != CUDA_SUCCESS) return false;
  copyRows(range.application, reinterpret_cast<uint64_t>(bounce.data()), range);
  return true;
}

bool landOne(const Carrier::Range& range) {
  if (isThere(range)) return true;
  if (range.rows == 1) return landRow(range);
  if (Session::get().mapsMemory()) {
    copyRows(range.application, range.shadow, range);
    return true;
  }
  const size_t most = std::max<size_t>(1, kBounce / range.pitch);
  for (size_t row = 0; row < range.rows; row += most) {
    const Carrier::Range part = range.part(row, std::min(most, range.rows - row));
    if (!(part.rows > 1 ? landRows(part) : landRow(part))) return false;
  }
  return true;
}

}  // namespace

Carrier& carrier() {
  static auto* instance = new Carrier;
  return *instance;
}

CUresult Carrier::fill(const StreamRef& ref, uint64_t ahead, const std::vector<Range>& ranges,
                       const std::shared_ptr<Launch>& launch) {
  Words& words = Session::get().words();
  const uint64_t gate = words.take();
  if (gate == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t opened = words.value(gate) + 1;
  std::vector<Move> moves;
  moves.reserve(ranges.size());
  for (const Range& range : ranges)
    moves.push_back({range, ref.stream->word, ahead, gate, opened, false, launch});
  moves.back().opens = true;
  push(std::move(moves));
  return postTo<"sessionGate">(ref, ref.wire, gate, opened);
}

CUresult Carrier::land(const StreamRef& ref, const std::vector<Range>& ranges,
                       const std::shared_ptr<Launch>& launch) {
  const CUresult status = sendLand(ref, ranges, launch);
  return status == CUDA_SUCCESS ? keepCredit(ref) : status;
}

bool Carrier::fetchNext(transport::Connection& next) {
  std::vector<Range> own;
  {
    std::lock_guard lock(mutex_);
    for (const Move& move : moves_)
      if (move.gate == 0 && isOwnShadow(move.range)) own.push_back(move.range);
  }
  for (const Range& range : own)
    for (size_t row = 0; row < range.rows; ++row)
      if (!hostMemory().fetchNext(next, range.application + row * range.pitch, range.bytes)) return false;
  return true;
}

CUresult Carrier::sendLand(const StreamRef& ref, const std::vector<Range>& ranges,
                           const std::shared_ptr<Launch>& launch) {
  uint64_t asked = 0;
  return sendWithWord(ref, asked, [&](uint64_t value) {
    const uint64_t word = ref.stream->word;
    if (launch != nullptr) launch->word = word, launch->value = value;
    std::vector<Move> moves;
    for (const Range& range : ranges)
      if (range.written) moves.push_back({range, word, value, 0, 0, false, launch});
    if (moves.empty()) moves.push_back({{}, word, value, 0, 0, false, launch});  // the launch's end
    push(std::move(moves));  // before it is sent: whoever sees the word finds them
    return Session::get().post<"sessionWord">(ref.context, ref.wire, word, value);
  });
}

void Carrier::push(std::vector<Move> moves) {
  std::lock_guard lock(mutex_);
  open_.fetch_add(moves.size(), std::memory_order_release);
  for (Move& move : moves) moves_.push_back(std::move(move));
  if (!std::exchange(started_, true)) transport::startQuietThread([this] { run(); })->detach();
  pushed_.notify_one();
}

bool Carrier::isReached(const Move& move) {
  const Words& words = Session::get().words();
  if (!words.reached(move.word, move.value)) return false;
  return move.gate == 0 || move.launch == nullptr ||
         words.reached(move.launch->afterWord, move.launch->afterValue);
}

std::vector<Carrier::Moves::iterator> Carrier::reached(bool fills) {
  std::vector<Moves::iterator> found;
  std::lock_guard lock(mutex_);
  for (auto move = moves_.begin(); move != moves_.end(); ++move)
    if ((move->gate != 0) == fills && isReached(*move)) found.push_back(move);
  return found;
}

// Under carrying_. True: there was something to do.
bool Carrier::carry(const std::vector<Moves::iterator>& moves) {
  Session& session = Session::get();
  for (const auto& move : moves) {
    // What is filled and the gate are one worker's: in memory that is shared with it, nobody else opens it.
    std::optional<Transfers::Inside> inside;
    if (move->gate != 0 && session.mapsMemory()) inside.emplace(session.transfers(), Transfers::alone);
    if (!(move->gate != 0 ? fillOne(move->range) : landOne(move->range))) return true;
    if (move->opens) {
      if (!session.mapsMemory()) session.post<"sessionGateOpen">(nullptr, move->gate, move->opened);
      session.words().set(move->gate, move->opened);
      session.words().retire(move->gate, move->opened);
      if (move->launch != nullptr) running_.push_back(move->launch);
    } else if (move->gate == 0 && move->launch != nullptr) {
      std::erase(running_, move->launch);
    }
    std::lock_guard lock(mutex_);
    moves_.erase(move);
    open_.fetch_sub(1, std::memory_order_release);
  }
  return !moves.empty();
}

void Carrier::landReached() {
  std::lock_guard lock(carrying_);
  carry(reached(false));
}

void Carrier::run() {
  Session& session = Session::get();
  const bool spin = sysconf(_SC_NPROCESSORS_ONLN) > 2;
  auto busy = transport::Clock::now();
  auto nap = kNap;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      pushed_.wait(lock, [&] { return !moves_.empty(); });
    }
    bool did = false;
    {
      std::lock_guard lock(carrying_);
      // Fills are looked for first: what was written ahead of one in its stream has then been reached too,
      // and lands before the fill reads it.
      const auto fills = reached(true);
      did = carry(reached(false));
      did |= carry(fills);
      if (session.words().sticky() != CUDA_SUCCESS) drop();  // the device gets no further
    }
    const auto now = transport::Clock::now();
    if (did) {
      busy = now;
      nap = kNap;
    } else if (!spin || now - busy > kSpin) {
      session.nap(nap);
      nap = std::min(nap * 2, kLongNap);
    }
  }
}

// Under carrying_.
void Carrier::drop() {
  running_.clear();
  std::lock_guard lock(mutex_);
  moves_.clear();
  open_.store(0, std::memory_order_release);
}

void Carrier::await(uint64_t application, size_t bytes) {
  const auto open = [&] {
    std::lock_guard lock(mutex_);
    return std::any_of(moves_.begin(), moves_.end(), [&](const Move& move) {
      return move.range.application < application + bytes &&
             application < move.range.application + move.range.span();
    });
  };
  while (open() && Session::get().words().sticky() == CUDA_SUCCESS) Session::get().nap(kNap);
  std::lock_guard lock(carrying_);
  if (open()) drop();  // the session is over
}

void Carrier::landRunning() {
  std::lock_guard lock(carrying_);
  for (const auto& launch : running_)
    for (const Range& range : launch->ranges)
      if (range.written && !landOne(range)) return;
}

void Carrier::fillRunning() {
  std::lock_guard lock(carrying_);
  for (const auto& launch : running_)
    for (const Range& range : launch->ranges)
      if (!fillOne(range)) return;
}

}  // namespace gpupool::client

#include "client/copies.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <optional>
#include <vector>

#include "client/graphs.h"
#include "client/memory/copy_threads.h"
#include "client/memory/host.h"
#include "client/memory/registered.h"
#include "client/memory/staging.h"

namespace gpupool::client {
namespace {

std::byte* bytesAt(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

constexpr size_t kAhead = 8;  // chunks of one copy under way
constexpr size_t kSmallestChunk = size_t{512} << 10;
constexpr size_t kParallel = size_t{4} << 20;    // from here on several threads copy
constexpr size_t kStreaming = size_t{16} << 20;  // larger than what a cache keeps of it

// A part of a large copy of ordinary memory, in a slot of its own.
struct Chunk {
  Staging::Slot slot;
  size_t at = 0, bytes = 0;
  uint64_t value = 0;  // of the stream's word when the device is done with it
  CopyThreads::Job job;
};

// How a large copy is cut: the first chunk's way to the device should not hold up the others for long.
class Cut {
 public:
  explicit Cut(size_t bytes)
      : bytes_(bytes),
        chunk_(std::clamp((bytes / 4 + 4095) & ~size_t{4095}, kSmallestChunk, Staging::kLarge)) {}
  size_t count() const { return (bytes_ + chunk_ - 1) / chunk_; }
  void place(size_t index, Chunk& chunk) const {
    chunk.at = index * chunk_;
    chunk.bytes = std::min(chunk_, bytes_ - chunk.at);
  }

 private:
  size_t bytes_, chunk_;
};

using Inside = Transfers::Inside;
Transfers& transfers() { return Session::get().transfers(); }

// Neither waits for the device: they may be called inside Transfers::named, where `staged`, an address of the
// worker's, stays what it is.
CUresult sendWrite(const StreamRef& ref, uint64_t to, Chunk& chunk, uint64_t staged) {
  return sendWithWord(ref, chunk.value, [&](uint64_t value) {
    return Session::get().post<"sessionWrite">(ref.context, ref.wire, CUdeviceptr{to + chunk.at},
                                               CUdeviceptr{staged}, nullptr, chunk.bytes, ref.stream->word,
                                               value);
  });
}

CUresult sendRead(const StreamRef& ref, uint64_t from, Chunk& chunk, uint64_t staged,
                  transport::Region region) {
  return sendWithWord(ref, chunk.value, [&](uint64_t value) {
    return Session::get().post<"sessionRead">(ref.context, ref.wire, CUdeviceptr{staged},
                                              CUdeviceptr{from + chunk.at}, chunk.bytes, ref.stream->word,
                                              value, schema::RegionName{region.id, region.generation},
                                              uint64_t{chunk.at}, nullptr, nullptr);
  });
}

// From a slot that is filled, and into one.
CUresult postWrite(const StreamRef& ref, uint64_t to, Chunk& chunk) {
  CUresult status = CUDA_SUCCESS;
  {
    const Inside inside(transfers(), Transfers::named);
    if (!staging().isShared(chunk.slot)) status = staging().bring(chunk.slot, chunk.bytes);
    if (status == CUDA_SUCCESS) status = sendWrite(ref, to, chunk, staging().address(chunk.slot));
  }
  return status == CUDA_SUCCESS ? keepCredit(ref) : status;
}

CUresult postRead(const StreamRef& ref, uint64_t from, Chunk& chunk) {
  CUresult status = CUDA_SUCCESS;
  {
    const Inside inside(transfers(), Transfers::named);
    status = sendRead(ref, from, chunk, staging().address(chunk.slot), {});
  }
  return status == CUDA_SUCCESS ? keepCredit(ref) : status;
}

// The bytes are in a slot or in the frame when this returns.
CUresult uploadSmall(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  Staging::Slot slot;
  CUresult status = staging().acquire(bytes, slot);
  if (status != CUDA_SUCCESS) return status;
  bool due = false;
  {
    const Inside inside(transfers(), Transfers::named);
    const uint64_t staged = staging().address(slot);
    if (staging().isShared(slot)) {
      std::memcpy(Staging::mapped(slot), bytesAt(from), bytes);
      status = sendTo<"cuMemcpyHtoDAsync_v2">(ref, due, CUdeviceptr{to},
                                              reinterpret_cast<const void*>(staged), bytes, ref.wire);
    } else {
      status = sendTo<"sessionWrite">(ref, due, ref.wire, CUdeviceptr{to}, CUdeviceptr{staged},
                                      reinterpret_cast<const unsigned char*>(from), bytes, uint64_t{0},
                                      uint64_t{0});
    }
  }
  if (due) status = keepCredit(ref);
  staging().releaseAfter(slot, ref, ref.stream->posted.load());
  return status;
}

// One host: several threads fill slots, in whatever order they finish the chunks leave in theirs.
CUresult uploadShared(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  const Cut cut(bytes);
  const bool parallel = bytes >= kParallel && CopyThreads::width() > 1;
  std::array<Chunk, kAhead> ring;
  size_t begun = 0, posted = 0;
  CUresult status = CUDA_SUCCESS;
  while (posted < cut.count() && status == CUDA_SUCCESS) {
    while (begun < cut.count() && begun - posted < (parallel ? kAhead : 1)) {
      Chunk& chunk = ring[begun % kAhead];
      cut.place(begun, chunk);
      if (!staging().tryAcquire(Staging::kLarge, chunk.slot)) {
        if (begun > posted) break;
        if (status = staging().acquire(Staging::kLarge, chunk.slot); status != CUDA_SUCCESS) return status;
      }
      chunk.job = {Staging::mapped(chunk.slot), bytesAt(from + chunk.at), chunk.bytes};
      copyThreads().start(chunk.job, parallel);
      ++begun;
    }
    Chunk& chunk = ring[posted++ % kAhead];
    copyThreads().finish(chunk.job);
    status = postWrite(ref, to, chunk);
    staging().releaseAfter(chunk.slot, ref, chunk.value);
  }
  for (; posted < begun; ++posted) {
    copyThreads().finish(ring[posted % kAhead].job);
    staging().release(ring[posted % kAhead].slot);
  }
  return status;
}

// Puts of one copy under way, inside Transfers::named as long as there are any.
class Puts {
 public:
  // Between two chunks: waits for a slot and for credit, outside.
  CUresult begin(const StreamRef& ref, Staging::Slot& slot) {
    CUresult status = CUDA_SUCCESS;
    if (!hasCredit(ref) && (status = pause()) == CUDA_SUCCESS) status = keepCredit(ref);
    if (status == CUDA_SUCCESS && !staging().tryAcquire(Staging::kLarge, slot)) {
      status = pause();
      if (status == CUDA_SUCCESS) status = staging().acquire(Staging::kLarge, slot);
    }
    if (status == CUDA_SUCCESS && !inside_) inside_.emplace(transfers(), Transfers::named);
    return status;
  }
  CUresult put(const Staging::Slot& slot, uint64_t from, size_t bytes) {
    transport::Transfer transfer = 0;
    CUresult status = staging().write(slot, bytesAt(from), bytes, transfer);
    if (transfer != 0) open_.push_back(transfer);
    return status;
  }
  CUresult finishOldest() {
    if (open_.empty()) return CUDA_SUCCESS;
    const transport::Transfer transfer = open_.front();
    open_.pop_front();
    return staging().finish(transfer);
  }
  size_t open() const { return open_.size(); }
  // All have landed.
  CUresult pause() {
    CUresult status = CUDA_SUCCESS;
    while (!open_.empty())
      if (CUresult done = finishOldest(); status == CUDA_SUCCESS) status = done;
    inside_.reset();
    return status;
  }

 private:
  std::deque<transport::Transfer> open_;
  std::optional<Inside> inside_;
};

// A network: from the application's buffer straight into the slots. It may be changed only when they are
// there.
CUresult uploadRemote(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  const Cut cut(bytes);
  Puts puts;
  CUresult status = CUDA_SUCCESS;
  for (size_t index = 0; index < cut.count() && status == CUDA_SUCCESS; ++index) {
    Chunk chunk;
    cut.place(index, chunk);
    if (status = puts.begin(ref, chunk.slot); status != CUDA_SUCCESS) break;
    status = puts.put(chunk.slot, from + chunk.at, chunk.bytes);
    chunk.value = ref.stream->posted.load();
    if (status == CUDA_SUCCESS) status = sendWrite(ref, to, chunk, staging().address(chunk.slot));
    staging().releaseAfter(chunk.slot, ref, chunk.value);
    if (status == CUDA_SUCCESS && puts.open() >= kAhead) status = puts.finishOldest();
  }
  const CUresult landed = puts.pause();
  if (status == CUDA_SUCCESS) status = landed;
  return status == CUDA_SUCCESS ? keepCredit(ref) : status;
}

CUresult uploadLinear(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  if (bytes <= Staging::kSmall) return uploadSmall(ref, to, from, bytes);
  return staging().isMapped() ? uploadShared(ref, to, from, bytes) : uploadRemote(ref, to, from, bytes);
}

// One host: chunks arrive in slots one after the other; the threads empty them.
CUresult downloadShared(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  const Cut cut(bytes);
  const size_t count = cut.count();
  const bool parallel = bytes >= kParallel && CopyThreads::width() > 1;
  std::array<Chunk, kAhead> ring;
  size_t asked = 0, arrived = 0, copied = 0;
  CUresult status = CUDA_SUCCESS;
  while (copied < count && status == CUDA_SUCCESS) {
    while (asked < count && asked - copied < kAhead && status == CUDA_SUCCESS) {
      Chunk& chunk = ring[asked % kAhead];
      cut.place(asked, chunk);
      if (!staging().tryAcquire(chunk.bytes, chunk.slot)) {
        if (asked > copied) break;
        if (status = staging().acquire(chunk.bytes, chunk.slot); status != CUDA_SUCCESS) break;
      }
      chunk.value = ref.stream->posted.load();
      status = postRead(ref, from, chunk);
      ++asked;
    }
    if (status != CUDA_SUCCESS) break;
    if (arrived < asked && (arrived == copied || isDone(ref, ring[arrived % kAhead].value))) {
      Chunk& chunk = ring[arrived % kAhead];
      if (status = waitFor(ref, chunk.value); status != CUDA_SUCCESS) break;
      if (!staging().isShared(chunk.slot)) status = staging().fetch(chunk.slot, chunk.bytes);
      if (status != CUDA_SUCCESS) break;
      chunk.job = {bytesAt(to + chunk.at), Staging::mapped(chunk.slot), chunk.bytes, bytes >= kStreaming};
      copyThreads().start(chunk.job, parallel);
      ++arrived;
      continue;
    }
    Chunk& chunk = ring[copied++ % kAhead];
    copyThreads().finish(chunk.job);
    staging().release(chunk.slot);
  }
  for (; copied < arrived; ++copied) {
    copyThreads().finish(ring[copied % kAhead].job);
    staging().release(ring[copied % kAhead].slot);
  }
  for (; copied < asked; ++copied)
    staging().releaseAfter(ring[copied % kAhead].slot, ref, ring[copied % kAhead].value);
  return status;
}

// A network, few bytes: they come with the answer.
CUresult downloadInline(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  Session& session = Session::get();
  Staging::Slot slot;
  CUresult status = staging().acquire(bytes, slot);
  if (status != CUDA_SUCCESS) return status;
  Session::Waiter waiter;
  size_t count = bytes;
  auto* data = reinterpret_cast<unsigned char*>(to);
  uint64_t value = ref.stream->posted.load();
  schema::RegionName none;
  uint64_t staged = 0;
  {
    const Inside inside(transfers(), Transfers::named);
    staged = staging().address(slot);
    status = sendWithWord(ref, value, [&](uint64_t word) {
      return session.ask<"sessionRead">(waiter, ref.context, ref.wire, CUdeviceptr{staged}, CUdeviceptr{from},
                                        bytes, ref.stream->word, word, none, uint64_t{0}, data, &count);
    });
  }
  if (status == CUDA_SUCCESS) status = keepCredit(ref);
  if (waiter.seq != 0) {
    CUresult answer =
        session.collect<"sessionRead">(waiter, ref.wire, CUdeviceptr{staged}, CUdeviceptr{from}, bytes,
                                       ref.stream->word, value, none, uint64_t{0}, data, &count);
    if (status == CUDA_SUCCESS) status = answer;
    if (answer == CUDA_SUCCESS) {
      const Inside inside(transfers(), Transfers::alone);  // nothing is noted while the log is sent again
      session.hearWord(ref.stream->word, value);
    }
  }
  staging().releaseAfter(slot, ref, value);
  if (status == CUDA_SUCCESS && count != bytes) status = CUDA_ERROR_UNKNOWN;
  return status == CUDA_SUCCESS ? settleHostMemory() : status;
}

// A network: the worker puts the bytes into the application's memory, which it may reach for that long. What
// is lent is lent to one worker: a move waits until the copy is done, and with it for what is ahead in the
// stream. False: the session shares memory now, and nothing was sent.
bool downloadRemote(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes, CUresult& status) {
  const Cut cut(bytes);
  const Inside inside(transfers(), Transfers::named);
  if (Session::get().mapsMemory()) return false;
  transport::Lent lent(Session::get().connection(), bytesAt(to), bytes);
  status = lent.region().id != 0 ? CUDA_SUCCESS : Session::get().transferFailed();
  std::deque<uint64_t> open;
  for (size_t index = 0; index < cut.count() && status == CUDA_SUCCESS; ++index) {
    Chunk chunk;
    cut.place(index, chunk);
    if (open.size() >= kAhead) {
      status = waitFor(ref, open.front());
      open.pop_front();
      if (status != CUDA_SUCCESS) break;
    }
    if (status = staging().acquire(Staging::kLarge, chunk.slot); status != CUDA_SUCCESS) break;
    chunk.value = ref.stream->posted.load();
    status = sendRead(ref, from, chunk, staging().address(chunk.slot), lent.region());
    if (status == CUDA_SUCCESS) status = keepCredit(ref);
    staging().releaseAfter(chunk.slot, ref, chunk.value);
    open.push_back(chunk.value);
  }
  if (status == CUDA_SUCCESS) status = waitFor(ref, open.back());
  return true;
}

// A network, a protected session: bytes on their way to us would depend on the worker's life.
CUresult downloadProtected(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  CUresult status = CUDA_SUCCESS;
  for (size_t at = 0; at < bytes && status == CUDA_SUCCESS; at += Staging::kSmall)
    status = downloadInline(ref, to + at, from + at, std::min(Staging::kSmall, bytes - at));
  return status;
}

CUresult downloadLinear(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  if (staging().isMapped()) return downloadShared(ref, to, from, bytes);
  if (bytes <= Staging::kSmall) return downloadInline(ref, to, from, bytes);
  if (Session::get().isProtected()) return downloadProtected(ref, to, from, bytes);
  CUresult status = CUDA_SUCCESS;
  if (downloadRemote(ref, to, from, bytes, status)) return status;
  return staging().isMapped() ? downloadShared(ref, to, from, bytes)
                              : downloadProtected(ref, to, from, bytes);  // it has left again
}

// Arena memory on a network goes piece by piece, so that the device takes one while the next one travels.
CUresult uploadArena(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  const Session& session = Session::get();
  CUresult status = CUDA_SUCCESS;
  for (size_t at = 0, n = 0; at < bytes && status == CUDA_SUCCESS; at += n) {
    n = session.mapsMemory() ? bytes - at : std::min(HostMemory::kTravel, bytes - at);
    bool due = false;
    if (!session.mapsMemory()) {
      if (carrier().busy()) carrier().await(from + at, n);
      status = hostMemory().awaitUpload(bytesAt(from + at), n);
    }
    if (status != CUDA_SUCCESS) break;
    {
      const Inside inside(transfers(), Transfers::named);
      if (!session.mapsMemory()) status = hostMemory().upload(*ref.stream, bytesAt(from + at), n);
      if (status == CUDA_SUCCESS)
        status = sendTo<"cuMemcpyHtoDAsync_v2">(ref, due, CUdeviceptr{to + at},
                                                reinterpret_cast<const void*>(from + at), n, ref.wire);
    }
    if (due) status = keepCredit(ref);
  }
  return status;
}

// One host, arena memory, and the caller waits: the copy and its word in one frame. False: the session has
// gone to another host, and nothing was sent.
bool copyArenaAwaited(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes, bool upload,
                      CUresult& status) {
  Chunk whole;
  whole.bytes = bytes;
  {
    const Inside inside(transfers(), Transfers::named);
    if (!Session::get().mapsMemory()) return false;
    status = upload ? sendWrite(ref, to, whole, from) : sendRead(ref, from, whole, to, {});
  }
  if (status == CUDA_SUCCESS) status = keepCredit(ref);
  if (status == CUDA_SUCCESS) status = waitFor(ref, whole.value);
  return true;
}

CUresult downloadArena(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  bool due = false;
  {
    const Inside inside(transfers(), Transfers::named);
    if (Session::get().mapsMemory()) {
      const CUresult status = sendTo<"cuMemcpyDtoHAsync_v2">(ref, due, reinterpret_cast<void*>(to),
                                                             CUdeviceptr{from}, bytes, ref.wire);
      if (!due) return status;
    }
  }
  return due ? keepCredit(ref) : hostMemory().download(ref, to, from, bytes);
}

// Host memory that kernels address, too, at `mirror`: what a kernel ahead writes there is what is copied, and
// what is copied there is what a kernel behind reads. The result comes as a kernel's does.
CUresult copyMirrored(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes, uint64_t mirror,
                      Timing timing) {
  CUresult status = hostMemory().publish();
  if (status != CUDA_SUCCESS) return status;
  if (!hostMemory().holds(mirror, bytes))  // a symbol
    status = postTo<"cuMemcpyDtoDAsync_v2">(ref, CUdeviceptr{to}, CUdeviceptr{from}, bytes, ref.wire);
  else if (mirror == from)
    status = postTo<"cuMemcpyHtoDAsync_v2">(ref, CUdeviceptr{to}, reinterpret_cast<const void*>(from), bytes,
                                            ref.wire);
  else
    status =
        postTo<"cuMemcpyDtoHAsync_v2">(ref, reinterpret_cast<void*>(to), CUdeviceptr{from}, bytes, ref.wire);
  return status == CUDA_SUCCESS && timing == Timing::sync ? synchronizeStream(ref) : status;
}

// Registered memory at the host end. A caller who waits is served by the staging slots, and so is a small
// copy to the device with nothing ahead of it, whose bytes may be taken at once.
CUresult copyRegistered(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes, bool toDevice,
                        Timing timing) {
  if (timing == Timing::async && toDevice && bytes <= Staging::kSmall && nothingAhead(ref)) {
    carrier().settle();
    return uploadLinear(ref, to, from, bytes);
  }
  if (timing == Timing::async)
    return toDevice ? registeredMemory().upload(ref, to, from, bytes)
                    : registeredMemory().download(ref, to, from, bytes);
  CUresult status = synchronizeStream(ref);
  if (status != CUDA_SUCCESS) return status;
  if (!toDevice) return downloadLinear(ref, to, from, bytes);
  status = uploadLinear(ref, to, from, bytes);
  return status == CUDA_SUCCESS ? returnBeforeLanding(ref) : status;
}

// Host memory on both ends: after everything before it in the stream.
CUresult betweenHosts(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  CUresult status = synchronizeStream(ref);
  if (status == CUDA_SUCCESS) std::memmove(bytesAt(to), bytesAt(from), bytes);
  return status;
}

// The node reads and writes the application's memory when the graph runs, not now.
CUresult captureEnd(const StreamRef& ref, uint64_t& address, End end, size_t bytes, bool written) {
  if (end == End::arena) mirrorArena(address);
  if (end != End::host && end != End::registered) return CUDA_SUCCESS;
  GraphHold hold;
  CUresult status = borrowForGraph(address, bytes, written, ref.context, address, hold);
  if (hold != nullptr) captureHolds(*ref.stream, std::move(hold));
  return status;
}

CUresult captureLinear(const StreamRef& ref, uint64_t to, End toEnd, uint64_t from, End fromEnd,
                       size_t bytes) {
  CUresult status = captureEnd(ref, to, toEnd, bytes, true);
  if (status == CUDA_SUCCESS) status = captureEnd(ref, from, fromEnd, bytes, false);
  if (status != CUDA_SUCCESS) return status;
  if (toEnd == End::device)
    return postTo<"cuMemcpyHtoDAsync_v2">(ref, CUdeviceptr{to}, reinterpret_cast<const void*>(from), bytes,
                                          ref.wire);
  if (fromEnd == End::device)
    return postTo<"cuMemcpyDtoHAsync_v2">(ref, reinterpret_cast<void*>(to), CUdeviceptr{from}, bytes,
                                          ref.wire);
  return postTo<"cuMemcpyDtoDAsync_v2">(ref, CUdeviceptr{to}, CUdeviceptr{from}, bytes, ref.wire);
}

}  // namespace

CUresult copyLinear(const StreamRef& ref, uint64_t to, End toEnd, uint64_t from, End fromEnd, size_t bytes,
                    Timing timing) {
  if (bytes == 0) return CUDA_SUCCESS;
  useShared(to, toEnd, bytes);
  useShared(from, fromEnd, bytes);
  if (toEnd == End::unknown || fromEnd == End::unknown || to == 0 || from == 0)
    return CUDA_ERROR_INVALID_VALUE;
  bool toDevice = toEnd == End::device, fromDevice = fromEnd == End::device;
  if ((toDevice && !mayAccess(ref.context, to, bytes, true)) ||
      (fromDevice && !mayAccess(ref.context, from, bytes, false)))
    return CUDA_ERROR_INVALID_VALUE;
  if (ref.stream->capturing.load() && !(toDevice && fromDevice))
    return captureLinear(ref, to, toEnd, from, fromEnd, bytes);
  if (!toDevice && !fromDevice) return betweenHosts(ref, to, from, bytes);
  if (toDevice && fromDevice)
    return postTo<"cuMemcpyDtoDAsync_v2">(ref, CUdeviceptr{to}, CUdeviceptr{from}, bytes, ref.wire);
  uint64_t mirror = 0;
  if (hostMemory().mirrored(toDevice ? from : to, bytes, mirror))
    return copyMirrored(ref, toDevice ? to : mirror, toDevice ? mirror : from, bytes, mirror, timing);
  if (fromEnd == End::registered || toEnd == End::registered)
    return copyRegistered(ref, to, from, bytes, toDevice, timing);
  if (toDevice && fromEnd == End::host) {
    CUresult status = uploadLinear(ref, to, from, bytes);
    return status == CUDA_SUCCESS && timing == Timing::sync ? returnBeforeLanding(ref) : status;
  }
  if (fromDevice && toEnd == End::host) return downloadLinear(ref, to, from, bytes);
  const Session& session = Session::get();
  CUresult status = CUDA_SUCCESS;
  if (timing == Timing::sync && session.mapsMemory() && !session.printing() &&
      copyArenaAwaited(ref, to, from, bytes, toDevice, status))
    return status;
  status = toDevice ? uploadArena(ref, to, from, bytes) : downloadArena(ref, to, from, bytes);
  if (status == CUDA_SUCCESS && timing == Timing::sync) status = synchronizeStream(ref);
  return status;
}

}  // namespace gpupool::client

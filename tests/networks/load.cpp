// The program that the network tests run: it keeps a session busy in one way, checks every byte that comes
// back, and says what became of it.
//
//   network_load check SECONDS [MIB] round after round: copies there and back, pageable and pinned, a kernel
//                                  between them, a memset, a host function; everything compared; until so
//                                  many MiB have moved, too
//   network_load watched SECONDS   the same, but fifty rounds a second at most, and until a line comes on
//   stdin network_load idle SECONDS      holds a session and calls nothing; then one check network_load wait
//   SECONDS      waits in cuStreamSynchronize for what never comes (SECONDS are not used) network_load held
//   SECONDS      round after round, once a line came on stdin: what a slow host function wrote, copied
//                                  there and back behind it
//   network_load KIND SECONDS [MIB] posts as fast as it can, when a line comes on stdin: launches, pageable,
//                                  pinned, downloads, memsets, callbacks; then waits for all and compares;
//                                  a copy has so many MiB (default: 32)
//
// network_load late SECONDS (not used) says "ready"; after a line on stdin it downloads round after round,
// the next one always under way; after another line it calls nothing, says "still" and looks at what has
// come, until a third line: nothing may write there any more.
//
// Exit status: 0 all was right; 3 a call failed (its error is printed); 4 bytes are not what they must be.

#include <cuda.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kWords = size_t{1} << 18;  // a MiB
constexpr size_t kBytes = kWords * 4;

void attempt(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* name = "an unknown error";
  cuGetErrorName(result, &name);
  std::printf("CUDA error: %s in %s\n", name, what);
  std::fflush(stdout);
  _exit(3);
}
#define CU(call) attempt(call, #call)

[[noreturn]] void corrupted(const char* what, size_t index, uint32_t got, uint32_t expected) {
  std::printf("CORRUPTED: %s: word %zu is %08x, not %08x\n", what, index, got, expected);
  std::fflush(stdout);
  _exit(4);
}

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

// data[i] = data[i] * 3 + add
const char kModule[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry scale(.param .u64 data, .param .u32 count, .param .u32 add) {
  .reg .pred %p;
  .reg .b32 %r<8>;
  .reg .b64 %d<4>;
  ld.param.u64 %d0, [data];
  ld.param.u32 %r0, [count];
  ld.param.u32 %r1, [add];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p, %r5, %r0;
  @%p bra DONE;
  cvta.to.global.u64 %d1, %d0;
  mul.wide.u32 %d2, %r5, 4;
  add.u64 %d3, %d1, %d2;
  ld.global.u32 %r6, [%d3];
  mad.lo.u32 %r7, %r6, 3, %r1;
  st.global.u32 [%d3], %r7;
DONE:
  ret;
}
)";

struct Device {
  CUcontext context = nullptr;
  CUmodule module = nullptr;
  CUfunction scale = nullptr;
  CUstream stream = nullptr;

  Device() {
    CUdevice device = 0;
    CU(cuInit(0));
    CU(cuDeviceGet(&device, 0));
    CU(cuDevicePrimaryCtxRetain(&context, device));
    CU(cuCtxSetCurrent(context));
    CU(cuModuleLoadData(&module, kModule));
    CU(cuModuleGetFunction(&scale, module, "scale"));
    CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  }
  void launch(CUdeviceptr data, uint32_t count, uint32_t add) {
    void* parameters[] = {&data, &count, &add};
    CU(cuLaunchKernel(scale, (count + 255) / 256, 1, 1, 256, 1, 1, 0, stream, parameters, nullptr));
  }
  CUdeviceptr allocate(size_t bytes) {
    CUdeviceptr data = 0;
    CU(cuMemAlloc(&data, bytes));
    return data;
  }
};

uint32_t word(uint32_t round, size_t index) {
  uint32_t x = static_cast<uint32_t>(index) * 2654435761u + round * 40503u;
  return x ^ x >> 15;
}

void fill(uint32_t* words, size_t count, uint32_t round) {
  for (size_t i = 0; i < count; ++i) words[i] = word(round, i);
}

void compare(const char* what, const uint32_t* words, size_t count, uint32_t round, uint32_t times,
             uint32_t add) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t expected = word(round, i) * times + add;
    if (words[i] != expected) corrupted(what, i, words[i], expected);
  }
}

std::atomic<uint32_t> called{0};
void CUDA_CB onHost(void* count) { called += static_cast<uint32_t>(reinterpret_cast<uintptr_t>(count)); }

class Rounds {
 public:
  Rounds() : data_(device_.allocate(kBytes)), pageable_(kWords), back_(kWords) {
    void *out = nullptr, *in = nullptr;
    CU(cuMemHostAlloc(&out, kBytes, 0));
    CU(cuMemHostAlloc(&in, kBytes, 0));
    pinnedOut_ = static_cast<uint32_t*>(out);
    pinnedIn_ = static_cast<uint32_t*>(in);
  }

  // Sizes differ from round to round, so that every way of copying has its turn.
  void one(uint32_t round) {
    const size_t count = round % 4 == 0 ? kWords : round % 4 == 1 ? 1000 : kWords / (1 + round % 7);
    const size_t bytes = count * 4;
    const bool pinned = round % 2 != 0;
    uint32_t* out = pinned ? pinnedOut_ : pageable_.data();
    uint32_t* in = pinned ? pinnedIn_ : back_.data();
    fill(out, count, round);
    CU(cuMemcpyHtoDAsync(data_, out, bytes, device_.stream));
    device_.launch(data_, static_cast<uint32_t>(count), round);
    CU(cuLaunchHostFunc(device_.stream, &onHost, reinterpret_cast<void*>(uintptr_t{1})));
    CU(cuMemcpyDtoHAsync(in, data_, bytes, device_.stream));
    CU(cuMemsetD32Async(data_, round, count, device_.stream));
    CU(cuStreamSynchronize(device_.stream));
    compare(pinned ? "pinned copies" : "pageable copies", in, count, round, 3, round);
    CU(cuMemcpyDtoH(in, data_, 256));
    for (size_t i = 0; i < 64; ++i)
      if (in[i] != round) corrupted("memset", i, in[i], round);
    if (called != ++calls_) corrupted("host functions", 0, called, calls_);
    moved_ += 2 * bytes;
  }
  uint64_t moved() const { return moved_; }

 private:
  Device device_;
  CUdeviceptr data_;
  std::vector<uint32_t> pageable_, back_;
  uint32_t *pinnedOut_ = nullptr, *pinnedIn_ = nullptr;
  uint32_t calls_ = 0;
  uint64_t moved_ = 0;
};

bool toldToEnd() {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  return poll(&input, 1, 20) > 0;
}

// For so long, and until so much has moved, however slow the machine is; watched: and until a line comes.
void checkRounds(double seconds, uint64_t leastBytes, bool watched = false) {
  Rounds rounds;
  say("ready");
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  auto told = Clock::now();
  uint32_t round = 0;
  do {
    rounds.one(++round);
    if (Clock::now() - told > std::chrono::milliseconds(100)) {
      told = Clock::now();
      say("round " + std::to_string(round));
    }
  } while (Clock::now() < end || rounds.moved() < leastBytes || (watched && !toldToEnd()));
  say("right: " + std::to_string(round) + " rounds, " + std::to_string(rounds.moved()) + " bytes");
}

void idle(double seconds) {
  Rounds rounds;
  rounds.one(1);
  say("ready");
  usleep(static_cast<useconds_t>(seconds * 1e6));
  rounds.one(2);
  say("right: 2 rounds, " + std::to_string(rounds.moved()) + " bytes");
}

void waitForever() {
  Device device;
  CUdeviceptr flag = device.allocate(4096);
  CU(cuMemsetD32(flag, 0, 1));
  CU(cuStreamWaitValue32(device.stream, flag, 1, CU_STREAM_WAIT_VALUE_EQ));
  say("ready");
  CU(cuStreamSynchronize(device.stream));
}

struct Slow {
  uint32_t* pinned;
  std::atomic<uint32_t> value;  // its readers' order is the stream's, which ThreadSanitizer does not see
};
void CUDA_CB slowly(void* data) {
  usleep(200'000);
  auto* slow = static_cast<Slow*>(data);
  *slow->pinned = slow->value;
}

void held(double seconds) {
  Device device;
  CUdeviceptr data = device.allocate(4096);
  void* pinned = nullptr;
  CU(cuMemHostAlloc(&pinned, 4096, 0));
  Slow slow{static_cast<uint32_t*>(pinned), 0};
  say("ready");
  std::getchar();
  say("posting");
  for (const auto end = Clock::now() + std::chrono::duration<double>(seconds); Clock::now() < end;) {
    uint32_t back = 0;
    ++slow.value;
    CU(cuLaunchHostFunc(device.stream, &slowly, &slow));
    CU(cuMemcpyHtoDAsync(data, pinned, 4, device.stream));
    CU(cuMemcpyDtoHAsync(&back, data, 4, device.stream));
    CU(cuStreamSynchronize(device.stream));
    if (back != slow.value) corrupted("held", 0, back, slow.value);
  }
  say("right: " + std::to_string(slow.value) + " rounds");
}

// A round fills one of two pinned buffers while the other one's is under way, so that the worker always has
// something to put there. A put that comes late brings the number of an earlier round.
class Downloads {
 public:
  Downloads() {
    for (Half& half : halves_) {
      half.data = device_.allocate(kBytes);
      CU(cuMemHostAlloc(&half.pinned, kBytes, 0));
      CU(cuEventCreate(&half.done, CU_EVENT_DISABLE_TIMING));
    }
  }
  void post(uint32_t round) {
    Half& half = halves_[round % 2];
    CU(cuMemsetD32Async(half.data, round, kWords, device_.stream));
    CU(cuMemcpyDtoHAsync(half.pinned, half.data, kBytes, device_.stream));
    CU(cuEventRecord(half.done, device_.stream));
  }
  void await(uint32_t round) {
    CU(cuEventSynchronize(halves_[round % 2].done));
    look(round);
  }
  void look(uint32_t round) const {
    const auto* words = static_cast<const volatile uint32_t*>(halves_[round % 2].pinned);
    for (size_t i = 0; i < kWords; ++i)
      if (const uint32_t got = words[i]; got != round) corrupted("downloads", i, got, round);
  }

 private:
  struct Half {
    CUdeviceptr data = 0;
    void* pinned = nullptr;
    CUevent done = nullptr;
  };
  Device device_;
  Half halves_[2];
};

// Reads no more than a line.
bool lineComes(int withinMs) {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  if (poll(&input, 1, withinMs) <= 0) return false;
  char got = 0;
  while (read(STDIN_FILENO, &got, 1) == 1 && got != '\n') {
  }
  return true;
}

void late() {
  Downloads downloads;
  say("ready");
  lineComes(-1);
  uint32_t round = 0;
  downloads.post(round);
  do {
    downloads.post(round + 1);
    downloads.await(round++);
  } while (!lineComes(0));
  downloads.await(round);
  say("still");
  do {
    downloads.look(round);
    downloads.look(round - 1);
  } while (!lineComes(20));
  say("right: nothing came late");
}

// Posts one kind of work without end, so that what the library keeps of it would show.
class Flood {
 public:
  Flood(const std::string& kind, size_t bytes) : kind_(kind), size_(bytes), data_(device_.allocate(bytes)) {
    host_.resize(size_ / 4);
    void* pinned = nullptr;
    CU(cuMemHostAlloc(&pinned, size_, 0));
    pinned_ = static_cast<uint32_t*>(pinned);
    fill(host_.data(), host_.size(), 1);
    std::memcpy(pinned_, host_.data(), size_);
    CU(cuMemcpyHtoD(data_, host_.data(), size_));
    device_.launch(data_, 1024, 0);  // accepted once: from here on launches are posted
    CU(cuStreamSynchronize(device_.stream));
    CU(cuMemcpyHtoD(data_, host_.data(), size_));
    CU(cuStreamSynchronize(device_.stream));
  }

  bool post() {
    if (kind_ == "launches") {
      device_.launch(data_, 256, 1);
    } else if (kind_ == "pageable") {
      CU(cuMemcpyHtoDAsync(data_, host_.data(), size_, device_.stream));
      bytes_ += size_;
    } else if (kind_ == "pinned") {
      CU(cuMemcpyHtoDAsync(data_, pinned_, size_, device_.stream));
      bytes_ += size_;
    } else if (kind_ == "downloads") {
      CU(cuMemcpyDtoHAsync(pinned_, data_, size_, device_.stream));
      bytes_ += size_;
    } else if (kind_ == "memsets") {
      CU(cuMemsetD32Async(data_, 0x5eed, 1024, device_.stream));
    } else if (kind_ == "callbacks") {
      CU(cuLaunchHostFunc(device_.stream, &onHost, reinterpret_cast<void*>(uintptr_t{1})));
    } else {
      return false;
    }
    ++posted_;
    return true;
  }

  void finish() {
    CU(cuStreamSynchronize(device_.stream));
    std::vector<uint32_t> back(1024);
    CU(cuMemcpyDtoH(back.data(), data_, back.size() * 4));
    for (size_t i = 0; i < back.size(); ++i) {
      uint32_t expected = host_[i];
      if (kind_ == "launches" && i < 256)
        for (uint64_t n = 0; n < posted_; ++n) expected = expected * 3 + 1;
      if (kind_ == "memsets") expected = 0x5eed;
      if (back[i] != expected) corrupted(kind_.c_str(), i, back[i], expected);
    }
    if (kind_ == "downloads" && std::memcmp(pinned_, host_.data(), size_) != 0)
      corrupted("downloads", 0, 0, 0);
    if (kind_ == "callbacks" && called != posted_)
      corrupted("callbacks", 0, called, static_cast<uint32_t>(posted_));
    say("right: " + std::to_string(posted_) + " posted, " + std::to_string(bytes_) + " bytes");
  }

 private:
  std::string kind_;
  size_t size_;
  Device device_;
  CUdeviceptr data_;
  std::vector<uint32_t> host_;
  uint32_t* pinned_ = nullptr;
  uint64_t posted_ = 0, bytes_ = 0;
};

int flood(const std::string& kind, double seconds, size_t bytes) {
  Flood flood(kind, bytes);
  say("ready");
  if (std::getchar() == EOF) return 2;
  say("posting");
  for (const auto end = Clock::now() + std::chrono::duration<double>(seconds); Clock::now() < end;)
    if (!flood.post()) return 2;
  say("posted");
  flood.finish();
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count != 3 && count != 4) return std::fprintf(stderr, "usage: network_load KIND SECONDS [MIB]\n"), 2;
  const std::string kind = words[1];
  const double seconds = std::strtod(words[2], nullptr);
  const auto mib = [&](uint64_t otherwise) {
    return (count == 4 ? std::strtoull(words[3], nullptr, 10) : otherwise) << 20;
  };
  if (kind == "check") return checkRounds(seconds, mib(0)), 0;
  if (kind == "watched") return checkRounds(seconds, 0, true), 0;
  if (kind == "idle") return idle(seconds), 0;
  if (kind == "wait") return waitForever(), 0;
  if (kind == "held") return held(seconds), 0;
  if (kind == "late") return late(), 0;
  return flood(kind, seconds, mib(32));
}

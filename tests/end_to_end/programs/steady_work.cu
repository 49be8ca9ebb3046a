// Works on all of its memory, round after round, and looks at every word in the end. For leases that take
// turns: its result shows each byte that came back wrong, and each round that was lost or came twice.
//   --mib N       so much device memory (default 8)
//   --rounds N    rounds of one kernel for each GiB, each round awaited (default 20)
//   --until FILE  as many rounds as it takes until the file exists
//   --pause MS    between two rounds; with --until no longer than until the file exists
//   --host-function  has the stream call a host function in each round
//   --clock       reads a clock of the device in each round, which no two runs show alike
//   --upload      uploads a number in each round, from memory that is overwritten at once; looks at their sum in the end
//   --by-query    in each round two streams whose work is ordered by queries of events alone; looks at the sum in
//                 the end
//   --mapped      in each round a kernel adds to a sum in mapped memory what the program has written there
//   --exit FILE   between two rounds ends with status 7 once the file exists, outside of any call; makes FILE.rests when
//                 it comes there
//   --ready       says "ready" and waits for a line on standard input before the first round. Says how many
//                 milliseconds the rounds took, on standard error.
//   --load        before the first round loads code that lies in the program's file, and code that it then
//                 overwrites and frees; both run in each round, which ends with a look at what they counted
//   --capture FILE  captures a first round, says so, and leaves the capture open until the file exists
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>

#include "check.h"

// One round: x = kFactor * x + kStep, for every word.
constexpr unsigned kFactor = 1664525, kStep = 1013904223;
constexpr size_t kPiece = size_t{1} << 30;

__global__ void fill(unsigned* words, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    words[i] = static_cast<unsigned>(i);
}
__global__ void advance(unsigned* words, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    words[i] = kFactor * words[i] + kStep;
}
__global__ void compare(const unsigned* words, size_t count, unsigned factor, unsigned step,
                        unsigned long long* wrong) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    if (words[i] != factor * static_cast<unsigned>(i) + step) atomicAdd(wrong, 1ull);
}

__global__ void readClock(long long* clock) { *clock = clock64(); }

__global__ void add(unsigned* sum, const unsigned* value) { *sum += *value; }

// Takes some milliseconds before it writes.
__global__ void writeLate(unsigned* to, unsigned value, unsigned* scratch) {
  unsigned x = value;
  for (int i = 0; i < 2'000'000; ++i) x = kFactor * x + kStep;
  *scratch = x;
  *to = value;
}

// Uploads and adds 1, 2, 3, ...
class Uploads {
 public:
  void round() {
    sent_.back() = ++rounds_;
    CUDA(cudaMemcpyAsync(uploaded_, sent_.data(), sent_.size() * sizeof(unsigned), cudaMemcpyHostToDevice));
    add<<<1, 1>>>(sum_, static_cast<unsigned*>(uploaded_) + sent_.size() - 1);
    sent_.back() = 0;
    expected_ += rounds_;
  }
  void look() { REQUIRE(sum_.read()[0] == expected_); }

 private:
  std::vector<unsigned> sent_ = std::vector<unsigned>(1 << 18);  // more than a frame carries
  unsigned rounds_ = 0, expected_ = 0;
  check::Device<unsigned> uploaded_{sent_}, sum_{std::vector<unsigned>{0}};
};

// One stream writes 1, 2, 3, ..., another one adds what it finds; that the first one has written, and that the other
// one has read, only the host knows.
class Queries {
 public:
  Queries() {
    for (int i = 0; i < 2; ++i) {
      CUDA(cudaStreamCreateWithFlags(&streams_[i], cudaStreamNonBlocking));
      CUDA(cudaEventCreateWithFlags(&events_[i], cudaEventDisableTiming));
    }
  }
  void round() {
    expected_ += ++rounds_;
    writeLate<<<1, 1, 0, streams_[0]>>>(written_, rounds_, scratch_);
    await(0);
    add<<<1, 1, 0, streams_[1]>>>(sum_, written_);
    await(1);
  }
  void look() { REQUIRE(sum_.read()[0] == expected_); }

 private:
  void await(int i) {
    CUDA(cudaEventRecord(events_[i], streams_[i]));
    cudaError_t status;
    while ((status = cudaEventQuery(events_[i])) == cudaErrorNotReady) std::this_thread::yield();
    CUDA(status);
  }
  cudaStream_t streams_[2];
  cudaEvent_t events_[2];
  unsigned rounds_ = 0, expected_ = 0;
  check::Device<unsigned> written_{std::vector<unsigned>{0}}, scratch_{std::vector<unsigned>{0}},
      sum_{std::vector<unsigned>{0}};
};

// Adds 1, 2, 3, ...
class Mapped {
 public:
  Mapped() {
    CUDA(cudaHostAlloc(&words_, 2 * sizeof *words_, cudaHostAllocMapped));
    words_[0] = words_[1] = 0;
  }
  void round() {
    expected_ += words_[0] = ++rounds_;
    add<<<1, 1>>>(words_ + 1, words_);
  }
  void look() { REQUIRE(words_[1] == expected_); }

 private:
  unsigned* words_ = nullptr;
  unsigned rounds_ = 0, expected_ = 0;
};

// Adds 1 to a counter.
static const char kCounts[] = R"(.version 7.0
.target sm_52
.address_size 64
.visible .entry counts(.param .u64 counter) {
  .reg .b64 %d<3>;
  .reg .b32 %r<2>;
  ld.param.u64 %d1, [counter];
  cvta.to.global.u64 %d2, %d1;
  atom.global.add.u32 %r1, [%d2], 1;
  ret;
}
)";

static cudaKernel_t load(const char* text) {
  cudaLibrary_t library = nullptr;
  cudaKernel_t kernel = nullptr;
  CUDA(cudaLibraryLoadData(&library, text, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CUDA(cudaLibraryGetKernel(&kernel, library, "counts"));
  return kernel;
}
static std::vector<cudaKernel_t> loadBoth() {
  std::string made(kCounts);
  made.replace(made.find(", 1;"), 4, ", 8;");
  std::vector<cudaKernel_t> both{load(kCounts), load(made.c_str())};
  std::fill(made.begin(), made.end(), ' ');
  return both;
}

using Pieces = std::vector<std::pair<unsigned*, size_t>>;

// So long, or until the file exists.
static void rest(int ms, const char* until, const char* exits) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
  if (exits != nullptr) std::fclose(std::fopen((std::string(exits) + ".rests").c_str(), "w"));
  while (true) {
    if (exits != nullptr && access(exits, F_OK) == 0) std::exit(7);
    if (std::chrono::steady_clock::now() >= end || (until != nullptr && access(until, F_OK) == 0)) return;
    const std::chrono::milliseconds look(exits == nullptr ? 100 : 1);
    std::this_thread::sleep_for(
        std::min<std::chrono::nanoseconds>(look, end - std::chrono::steady_clock::now()));
  }
}

static void captureRound(const Pieces& pieces, const char* until) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t work;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (auto [words, count] : pieces) advance<<<1024, 256, 0, stream>>>(words, count);
  check::say("captures");
  std::fflush(stdout);
  while (access(until, F_OK) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&work, graph, 0));
  CUDA(cudaGraphLaunch(work, stream));
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaGraphExecDestroy(work));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(stream));
}

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  const char *until = nullptr, *captured = nullptr, *exits = nullptr;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--until") == 0) until = argv[i + 1];
    if (std::strcmp(argv[i], "--capture") == 0) captured = argv[i + 1];
    if (std::strcmp(argv[i], "--exit") == 0) exits = argv[i + 1];
  }
  const int rounds = check::option(argc, argv, "--rounds", 20),
            pause = check::option(argc, argv, "--pause", 0);
  Pieces pieces;
  for (size_t left = size_t(check::option(argc, argv, "--mib", 8)) << 20; left != 0;) {
    const size_t bytes = left < kPiece ? left : kPiece;
    unsigned* words = nullptr;
    CUDA(cudaMalloc(&words, bytes));
    pieces.emplace_back(words, bytes / sizeof *words);
    left -= bytes;
  }
  for (auto [words, count] : pieces) fill<<<1024, 256>>>(words, count);
  CUDA(cudaDeviceSynchronize());
  if (check::flag(argc, argv, "--ready")) {
    check::say("ready");
    std::fflush(stdout);
    while (std::getchar() != '\n' && !std::feof(stdin)) {
    }
  }

  std::optional<check::Device<long long>> clock;
  const bool calls = check::flag(argc, argv, "--host-function");
  int called = 0;
  if (check::flag(argc, argv, "--clock")) clock.emplace(std::vector<long long>{0});
  std::optional<Uploads> uploads;
  if (check::flag(argc, argv, "--upload")) uploads.emplace();
  std::optional<Mapped> mapped;
  if (check::flag(argc, argv, "--mapped")) mapped.emplace();
  std::optional<Queries> queries;
  if (check::flag(argc, argv, "--by-query")) queries.emplace();
  std::vector<cudaKernel_t> loaded;
  if (check::flag(argc, argv, "--load")) loaded = loadBoth();
  check::Device<unsigned> counted(std::vector<unsigned>{0});
  unsigned counts = 0;
  const auto began = Clock::now();
  unsigned factor = 1, step = 0;
  if (captured != nullptr) {
    captureRound(pieces, captured);
    factor = kFactor;
    step = kStep;
  }
  for (int round = 0; until != nullptr ? access(until, F_OK) != 0 : round < rounds; ++round) {
    for (auto [words, count] : pieces) advance<<<1024, 256>>>(words, count);
    if (calls) CUDA(cudaLaunchHostFunc(nullptr, [](void* count) { ++*static_cast<int*>(count); }, &called));
    if (clock) readClock<<<1, 1>>>(*clock);
    if (uploads) uploads->round();
    if (queries) queries->round();
    if (mapped) mapped->round();
    for (cudaKernel_t kernel : loaded) {
      unsigned* counter = counted;
      void* parameters[] = {&counter};
      CUDA(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), 1, 1, parameters, 0, nullptr));
    }
    CUDA(cudaDeviceSynchronize());
    if (mapped) mapped->look();
    if (!loaded.empty()) REQUIRE(counted.read()[0] == (counts += 9));
    if (clock) REQUIRE(clock->read()[0] != 0);
    REQUIRE(!calls || called == round + 1);
    factor *= kFactor;
    step = kFactor * step + kStep;
    rest(pause, until, exits);
  }
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();

  check::Device<unsigned long long> wrong(std::vector<unsigned long long>{0});
  for (auto [words, count] : pieces) compare<<<1024, 256>>>(words, count, factor, step, wrong);
  CUDA(cudaDeviceSynchronize());
  REQUIRE(wrong.read()[0] == 0);
  REQUIRE(counted.read()[0] == counts);
  if (uploads) uploads->look();
  if (queries) queries->look();
  if (check::flag(argc, argv, "--ready")) std::fprintf(stderr, "%lld\n", static_cast<long long>(took));
  for (auto [words, count] : pieces) CUDA(cudaFree(words));
  return check::pass();
}

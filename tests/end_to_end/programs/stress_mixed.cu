// Many threads, each with several streams, that mix everything for a given time: allocations of all kinds,
// pinned and pageable copies, kernels, events across streams, host functions, graphs, memsets, textures,
// modules that come and go, streams that end and begin. Every step checks what it computed. --samples reports
// the device memory in use to standard error, twice a second and when nothing is under way any more.
#include <cuda.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "driver_check.h"

constexpr unsigned kFactor = 2246822519u;
constexpr int kMostWords = 12000;

__global__ void mixIn(unsigned* words, int count, unsigned key) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    words[i] = (words[i] ^ key) * kFactor;
}
__global__ void addTo(const unsigned* from, unsigned* to, int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    to[i] += from[i];
}
// Of a row of words, and of an array of as many.
__global__ void addTextures(cudaTextureObject_t row, cudaTextureObject_t array, unsigned* out, int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    out[i] = tex1Dfetch<unsigned>(row, i) + tex2D<unsigned>(array, static_cast<float>(i) + 0.5f, 0.5f);
}

// A module of one kernel that adds a number of its own to one word.
static std::string moduleText(unsigned number) {
  return ".version 7.0\n.target sm_52\n.address_size 64\n"
         ".visible .entry addNumber(.param .u64 word)\n{\n"
         "  .reg .u32 %value;\n  .reg .u64 %at;\n"
         "  ld.param.u64 %at, [word];\n  ld.global.u32 %value, [%at];\n  add.u32 %value, %value, " +
         std::to_string(number) + ";\n  st.global.u32 [%at], %value;\n  ret;\n}\n";
}

using Words = std::vector<unsigned>;

// Device memory from one of the two allocators.
class Block {
 public:
  Block(size_t words, cudaStream_t stream, bool ordered) : stream_(stream), ordered_(ordered) {
    const size_t bytes = words * sizeof(unsigned);
    CUDA(ordered ? cudaMallocAsync(&words_, bytes, stream) : cudaMalloc(&words_, bytes));
  }
  ~Block() { CUDA(ordered_ ? cudaFreeAsync(words_, stream_) : cudaFree(words_)); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  operator unsigned*() const { return words_; }

 private:
  cudaStream_t stream_;
  bool ordered_;
  unsigned* words_ = nullptr;
};

// Host memory, pinned or not.
class Host {
 public:
  Host(size_t words, bool pinned) : pageable_(pinned ? 0 : words), words_(pageable_.data()) {
    if (pinned) CUDA(cudaMallocHost(&words_, words * sizeof(unsigned)));
  }
  ~Host() {
    if (words_ != pageable_.data()) CUDA(cudaFreeHost(words_));
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  operator unsigned*() const { return words_; }

 private:
  Words pageable_;
  unsigned* words_;
};

class Worker {
 public:
  Worker(int index, int streams) : index_(index), random_(7000 + index), streams_(streams) {
    CUDA(cudaSetDevice(0));
    for (cudaStream_t& stream : streams_) create(stream);
  }
  ~Worker() {
    for (cudaStream_t stream : streams_) {
      CUDA(cudaStreamSynchronize(stream));
      CUDA(cudaStreamDestroy(stream));
    }
  }

  void step() {
    static void (Worker::* const kinds[])() = {&Worker::compute,  &Worker::compute, &Worker::acrossStreams,
                                               &Worker::callback, &Worker::graph,   &Worker::memsets,
                                               &Worker::module,   &Worker::texture, &Worker::newStream};
    (this->*kinds[random_.below(sizeof kinds / sizeof kinds[0])])();
  }

 private:
  static void create(cudaStream_t& stream) {
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  cudaStream_t anyStream() { return streams_[random_.below(static_cast<uint32_t>(streams_.size()))]; }
  int anyCount() { return 1 + static_cast<int>(random_.below(random_.below(8) == 0 ? kMostWords : 1500)); }
  Words anyWords(int count) {
    Words words(count);
    for (unsigned& word : words) word = random_.next();
    return words;
  }
  void mix(unsigned* device, Words& mirror, cudaStream_t stream) {
    const unsigned key = random_.next();
    mixIn<<<2, 64, 0, stream>>>(device, static_cast<int>(mirror.size()), key);
    CUDA(cudaGetLastError());
    for (unsigned& word : mirror) word = (word ^ key) * kFactor;
  }
  void verify(const char* what, const unsigned* got, const Words& expected) const {
    for (size_t i = 0; i < expected.size(); ++i)
      if (got[i] != expected[i])
        check::fail("thread %d, %s: [%zu] of %zu is %u, expected %u", index_, what, i, expected.size(),
                    got[i], expected[i]);
  }

  void compute() {
    cudaStream_t stream = anyStream();
    Words mirror = anyWords(anyCount());
    const size_t bytes = mirror.size() * sizeof(unsigned);
    Block device(mirror.size(), stream, random_.below(2));
    Host in(mirror.size(), random_.below(2)), out(mirror.size(), random_.below(2));
    std::memcpy(in, mirror.data(), bytes);
    CUDA(cudaMemcpyAsync(device, in, bytes, cudaMemcpyHostToDevice, stream));
    for (unsigned launches = random_.below(6); launches > 0; --launches) mix(device, mirror, stream);
    if (random_.below(4) == 0) {
      CUDA(cudaStreamSynchronize(stream));
      CUDA(cudaMemcpy(out, device, bytes, cudaMemcpyDeviceToHost));
    } else {
      CUDA(cudaMemcpyAsync(out, device, bytes, cudaMemcpyDeviceToHost, stream));
      CUDA(cudaStreamSynchronize(stream));
    }
    verify("compute", out, mirror);
  }

  void acrossStreams() {
    cudaStream_t first = anyStream(), second = anyStream();
    Words left = anyWords(anyCount()), right = anyWords(static_cast<int>(left.size()));
    const size_t bytes = left.size() * sizeof(unsigned);
    Block a(left.size(), first, false), b(left.size(), second, false);
    cudaEvent_t ready;
    CUDA(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    CUDA(cudaMemcpyAsync(a, left.data(), bytes, cudaMemcpyHostToDevice, first));
    mix(a, left, first);
    CUDA(cudaEventRecord(ready, first));
    CUDA(cudaMemcpyAsync(b, right.data(), bytes, cudaMemcpyHostToDevice, second));
    CUDA(cudaStreamWaitEvent(second, ready, 0));
    addTo<<<2, 64, 0, second>>>(a, b, static_cast<int>(left.size()));
    CUDA(cudaGetLastError());
    CUDA(cudaEventRecord(ready, second));
    CUDA(cudaEventSynchronize(ready));
    CUDA(cudaEventDestroy(ready));
    Words got(left.size());
    CUDA(cudaMemcpy(got.data(), b, bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < left.size(); ++i) right[i] += left[i];
    verify("across streams", got.data(), right);
  }

  struct Fill {
    unsigned* words;
    int count;
    unsigned start;
  };
  void callback() {
    cudaStream_t stream = anyStream();
    Words mirror(anyCount());
    const size_t bytes = mirror.size() * sizeof(unsigned);
    Host shared(mirror.size(), true);
    Fill fill = {shared, static_cast<int>(mirror.size()), random_.next()};
    for (size_t i = 0; i < mirror.size(); ++i) mirror[i] = fill.start + static_cast<unsigned>(i);
    Block device(mirror.size(), stream, true);
    CUDA(cudaLaunchHostFunc(
        stream,
        [](void* data) {
          auto* what = static_cast<Fill*>(data);
          for (int i = 0; i < what->count; ++i) what->words[i] = what->start + static_cast<unsigned>(i);
        },
        &fill));
    CUDA(cudaMemcpyAsync(device, shared, bytes, cudaMemcpyHostToDevice, stream));
    mix(device, mirror, stream);
    CUDA(cudaMemcpyAsync(shared, device, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    verify("callback", shared, mirror);
  }

  void graph() {
    cudaStream_t stream = anyStream();
    CUDA(cudaStreamSynchronize(stream));
    Words mirror(anyCount(), 0x07070707u);
    const size_t bytes = mirror.size() * sizeof(unsigned);
    Block device(mirror.size(), stream, false);
    Host out(mirror.size(), true);
    cudaGraph_t captured;
    cudaGraphExec_t ready;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CUDA(cudaMemsetAsync(device, 7, bytes, stream));
    mix(device, mirror, stream);
    mix(device, mirror, stream);
    CUDA(cudaMemcpyAsync(out, device, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamEndCapture(stream, &captured));
    CUDA(cudaGraphInstantiate(&ready, captured, 0));
    CUDA(cudaGraphDestroy(captured));
    for (int launch = 0; launch < 3; ++launch) {
      CUDA(cudaGraphLaunch(ready, stream));
      CUDA(cudaStreamSynchronize(stream));
      verify("graph", out, mirror);
      std::memset(out, 0, bytes);
    }
    CUDA(cudaGraphExecDestroy(ready));
  }

  void memsets() {
    cudaStream_t stream = anyStream();
    const int rows = 1 + static_cast<int>(random_.below(20)),
              columns = 1 + static_cast<int>(random_.below(40));
    Words mirror(static_cast<size_t>(rows) * columns), got(mirror.size());
    Block device(mirror.size(), stream, random_.below(2));
    const unsigned byte = random_.below(256);
    CUDA(cudaMemsetAsync(device, 0, mirror.size() * sizeof(unsigned), stream));
    const int part = 1 + static_cast<int>(random_.below(columns));
    CUDA(cudaMemset2DAsync(device, columns * sizeof(unsigned), static_cast<int>(byte),
                           part * sizeof(unsigned), rows, stream));
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < part; ++column) mirror[row * columns + column] = byte * 0x01010101u;
    CUDA(cudaMemcpyAsync(got.data(), device, got.size() * sizeof(unsigned), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    verify("memsets", got.data(), mirror);
  }

  void module() {
    cudaStream_t stream = anyStream();
    const unsigned number = 1 + random_.below(8), start = random_.next();
    Block word(1, stream, false);
    CUmodule loaded;
    CUfunction add;
    DRIVER(cuModuleLoadData(&loaded, moduleText(number).c_str()));
    DRIVER(cuModuleGetFunction(&add, loaded, "addNumber"));
    CUDA(cudaMemcpyAsync(word, &start, sizeof start, cudaMemcpyHostToDevice, stream));
    unsigned* address = word;
    void* arguments[] = {&address};
    for (int launch = 0; launch < 2; ++launch)
      DRIVER(cuLaunchKernel(add, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
    unsigned got = 0;
    CUDA(cudaMemcpyAsync(&got, word, sizeof got, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    DRIVER(cuModuleUnload(loaded));
    verify("module", &got, {start + 2 * number});
  }

  static cudaTextureObject_t textureOf(const cudaResourceDesc& resource) {
    cudaTextureDesc description = {};
    description.addressMode[0] = description.addressMode[1] = cudaAddressModeClamp;
    description.filterMode = cudaFilterModePoint;
    description.readMode = cudaReadModeElementType;
    cudaTextureObject_t texture;
    CUDA(cudaCreateTextureObject(&texture, &resource, &description, nullptr));
    return texture;
  }

  void texture() {
    cudaStream_t stream = anyStream();
    const int count = anyCount();
    Words words = anyWords(count), got(count);
    const size_t bytes = words.size() * sizeof(unsigned);
    Block row(count, stream, false), out(count, stream, true);
    cudaResourceDesc linear = {}, image = {};
    linear.resType = cudaResourceTypeLinear;
    linear.res.linear.devPtr = row;
    linear.res.linear.desc = cudaCreateChannelDesc<unsigned>();
    linear.res.linear.sizeInBytes = bytes;
    image.resType = cudaResourceTypeArray;
    CUDA(cudaMallocArray(&image.res.array.array, &linear.res.linear.desc, count, 1));
    const cudaTextureObject_t first = textureOf(linear), second = textureOf(image);
    CUDA(cudaMemcpyAsync(row, words.data(), bytes, cudaMemcpyHostToDevice, stream));
    CUDA(cudaMemcpy2DToArrayAsync(image.res.array.array, 0, 0, words.data(), bytes, bytes, 1,
                                  cudaMemcpyHostToDevice, stream));
    addTextures<<<2, 64, 0, stream>>>(first, second, out, count);
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpyAsync(got.data(), out, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaDestroyTextureObject(second));
    CUDA(cudaDestroyTextureObject(first));
    CUDA(cudaFreeArray(image.res.array.array));
    for (unsigned& word : words) word *= 2;
    verify("texture", got.data(), words);
  }

  void newStream() {
    cudaStream_t& stream = streams_[random_.below(static_cast<uint32_t>(streams_.size()))];
    if (random_.below(2)) CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaStreamDestroy(stream));
    create(stream);
  }

  int index_;
  check::Random random_;
  std::vector<cudaStream_t> streams_;
};

void sampleDevice(const char* when) {
  size_t free = 0, total = 0;
  CUDA(cudaMemGetInfo(&free, &total));
  std::fprintf(stderr, "%s %zu KiB\n", when, (total - free) >> 10);
}

// Within so many milliseconds.
bool inputEnds(int milliseconds) {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  char byte;
  return poll(&input, 1, milliseconds) > 0 && read(STDIN_FILENO, &byte, 1) <= 0;
}

int main(int argc, char** argv) {
  const int threads = check::option(argc, argv, "--threads", 16),
            streams = check::option(argc, argv, "--streams", 4),
            seconds = check::option(argc, argv, "--seconds", 3);
  const bool samples = check::flag(argc, argv, "--samples");
  CUDA(cudaFree(nullptr));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  std::atomic<bool> over{false};
  std::atomic<long> steps{0};
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i)
    running.emplace_back([=, &steps, &over] {
      Worker worker(i, streams);
      while (!over) {
        worker.step();
        ++steps;
      }
    });
  // Whoever samples decides when there are enough: it closes our standard input.
  for (bool told = !samples; !told || std::chrono::steady_clock::now() < end;) {
    if (samples) sampleDevice("device");
    if (told) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (!told) told = inputEnds(500);
  }
  over = true;
  for (std::thread& thread : running) thread.join();
  if (samples) {
    CUDA(cudaDeviceSynchronize());
    sampleDevice("rest");
    std::fprintf(stderr, "steps %ld\n", steps.load());
  }
  REQUIRE(steps >= threads);
  check::say("all results are right");
  return check::pass();
}

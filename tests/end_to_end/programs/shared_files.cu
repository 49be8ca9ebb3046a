// Registered memory that is a file's, mapped to be shared (MAP_SHARED of /dev/shm), as NCCL and PyTorch have
// it. Kernels and processors that have it mapped somewhere see one another's writes while they run: two
// kernels of this process by two mappings, a kernel and the processor, and the kernels of two processes.
// Needs client and worker on one host.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "check.h"

constexpr size_t kPage = 4096;
constexpr size_t kBytes = 2 << 20;
constexpr int kTurns = 20;
constexpr int kFlag = 0, kAnswer = 1, kGuest = 16;  // words of the file

// Answers each turn of `flag` in `answer`, and gives up after a while: 1 in `late`.
__global__ void answerTurns(volatile int* flag, volatile int* answer, int turns, volatile int* late) {
  unsigned long long begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  for (int turn = 1; turn <= turns; ++turn) {
    while (*flag != turn) {
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (now - begun > 20000000000ull) {
        *late = 1;
        return;
      }
    }
    __threadfence_system();
    *answer = turn;
  }
}
// The other end: says each turn, and waits for its answer.
__global__ void sayTurns(volatile int* flag, volatile int* answer, int turns, volatile int* late) {
  unsigned long long begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  for (int turn = 1; turn <= turns; ++turn) {
    *flag = turn;
    __threadfence_system();
    while (*answer != turn) {
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (now - begun > 20000000000ull) {
        *late = 1;
        return;
      }
    }
  }
}
__global__ void add(int* values, int count, int step) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    values[i] += step;
}

static int* mapAll(int file) {
  void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  REQUIRE(at != MAP_FAILED);
  return static_cast<int*>(at);
}
static int* registered(void* at, size_t bytes) {
  CUDA(cudaHostRegister(at, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
  void* device = nullptr;
  CUDA(cudaHostGetDevicePointer(&device, at, 0));
  return static_cast<int*>(device);
}

struct Late {
  int* flag = nullptr;
  Late() {
    CUDA(cudaMallocHost(&flag, sizeof(int)));
    *flag = 0;
  }
  void verify(const char* what) const {
    if (*static_cast<volatile int*>(flag) != 0) check::fail("%s: nothing was heard", what);
    check::say("%s: %d turns", what, kTurns);
  }
};

static void withProcessor(int* host, int* device, const Late& late) {
  std::memset(host, 0, kPage);
  answerTurns<<<1, 1>>>(device + kFlag, device + kAnswer, kTurns, late.flag);
  volatile int* words = host;
  for (int turn = 1; turn <= kTurns; ++turn) {
    words[kFlag] = turn;
    while (words[kAnswer] != turn)
      if (cudaStreamQuery(nullptr) != cudaErrorNotReady) break;
  }
  CUDA(cudaDeviceSynchronize());
  cudaGetLastError();
  late.verify("a kernel and the processor");
  REQUIRE(words[kAnswer] == kTurns);
}

static void twoKernels(int* host, int* first, int* second, const Late& late) {
  std::memset(host, 0, kPage);
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  answerTurns<<<1, 1, 0, streams[0]>>>(first + kFlag, first + kAnswer, kTurns, late.flag);
  sayTurns<<<1, 1, 0, streams[1]>>>(second + kFlag, second + kAnswer, kTurns, late.flag);
  CUDA(cudaDeviceSynchronize());
  late.verify("two kernels by two mappings");
  REQUIRE(host[kAnswer] == kTurns);
  for (cudaStream_t stream : streams) CUDA(cudaStreamDestroy(stream));
}

// The one mapping is copied to, the other one from; the processor reads and writes in between.
static void copies(int* first, int* second) {
  constexpr int kCount = kBytes / sizeof(int) / 2;
  int* device;
  CUDA(cudaMalloc(&device, kCount * sizeof(int)));
  for (int i = 0; i < kCount; ++i) first[i] = i;
  CUDA(cudaMemcpyAsync(device, second, kCount * sizeof(int), cudaMemcpyHostToDevice));
  add<<<32, 256>>>(device, kCount, 5);
  CUDA(cudaMemcpyAsync(second + kCount, device, kCount * sizeof(int), cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpyAsync(device, first + kCount, kCount * sizeof(int), cudaMemcpyHostToDevice));
  add<<<32, 256>>>(device, kCount, 7);
  CUDA(cudaMemcpy(first, device, kCount * sizeof(int), cudaMemcpyDeviceToHost));
  int wrong = 0;
  for (int i = 0; i < kCount; ++i) wrong += second[i] != i + 12 || second[kCount + i] != i + 5;
  check::say("copies: %d wrong", wrong);
  REQUIRE(wrong == 0);
  // Rows, and a host end on both sides.
  CUDA(cudaMemcpy2DAsync(device, 64, second + 8, 256, 64, 100, cudaMemcpyHostToDevice));
  add<<<32, 256>>>(device, 1600, 1);
  CUDA(cudaMemcpy2DAsync(first + 8, 256, device, 64, 64, 100, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpyAsync(first + 64, second, 64, cudaMemcpyHostToHost));
  CUDA(cudaDeviceSynchronize());
  for (int row = 0; row < 100; ++row)
    for (int i = 0; i < 16; ++i) {
      const int value = second[8 + row * 64 + i], expected = 8 + row * 64 + i + 12 + 1;
      wrong += row != 1 && value != expected;
    }
  for (int i = 0; i < 16; ++i) wrong += second[64 + i] != first[i];
  check::say("rows: %d wrong", wrong);
  REQUIRE(wrong == 0);
  CUDA(cudaFree(device));
}

static void inGraph(int* first, int* second) {
  constexpr int kCount = 1000;
  int* device;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaMalloc(&device, kCount * sizeof(int)));
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  CUDA(cudaMemcpyAsync(device, first, kCount * sizeof(int), cudaMemcpyHostToDevice, stream));
  add<<<4, 64, 0, stream>>>(device, kCount, 1);
  CUDA(cudaMemcpyAsync(first, device, kCount * sizeof(int), cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < kCount; ++i) second[i] = i;
  for (int turn = 0; turn < 3; ++turn) CUDA(cudaGraphLaunch(exec, stream));
  CUDA(cudaStreamSynchronize(stream));
  int wrong = 0;
  for (int i = 0; i < kCount; ++i) wrong += second[i] != i + 3;
  check::say("in a graph: %d wrong", wrong);
  REQUIRE(wrong == 0);
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(stream));
  CUDA(cudaFree(device));
}

// A part that begins and ends within pages; the kernel is given no more than that.
static void partOfPages(int file) {
  int *one = mapAll(file), *other = mapAll(file);
  constexpr int kFirst = 1500, kCount = 5000;
  int* device = registered(one + kFirst, kCount * sizeof(int));
  for (int i = 0; i < kCount + 2; ++i) other[kFirst - 1 + i] = i;
  add<<<8, 64>>>(device, kCount, 100);
  add<<<8, 64>>>(device + 7, 3, 1000);
  CUDA(cudaDeviceSynchronize());
  int wrong = 0;
  for (int i = 0; i < kCount + 2; ++i) {
    const int inside = i >= 1 && i <= kCount, more = i >= 8 && i < 11;
    wrong += other[kFirst - 1 + i] != i + 100 * inside + 1000 * more;
  }
  check::say("a part of pages: %d wrong", wrong);
  REQUIRE(wrong == 0);
  CUDA_GIVES(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(one + kFirst, 64, 0));
  cudaGetLastError();
  CUDA(cudaHostUnregister(one + kFirst));
  device = registered(one + kFirst, kCount * sizeof(int));  // again, after it was given back
  add<<<8, 64>>>(device, kCount, 100);
  CUDA(cudaDeviceSynchronize());
  REQUIRE(other[kFirst] == 1 + 200);
  CUDA(cudaHostUnregister(one + kFirst));
  munmap(one, kBytes);
  munmap(other, kBytes);
}

// A file without a name and without a descriptor; memory that nobody shares; two mappings side by side.
static void otherMemory() {
  const int file = memfd_create("unnamed", MFD_CLOEXEC);
  REQUIRE(file >= 0 && ftruncate(file, kBytes) == 0);
  int *one = mapAll(file), *other = mapAll(file);
  int* device = registered(one, kBytes);
  other[3] = 4;
  add<<<1, 64>>>(device, 8, 10);
  CUDA(cudaDeviceSynchronize());
  REQUIRE(other[3] == 14);
  CUDA(cudaHostUnregister(one));
  munmap(one, kBytes);
  munmap(other, kBytes);
  close(file);
  void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(at != MAP_FAILED);
  auto* own = static_cast<int*>(at);
  device = registered(own, kBytes);
  own[3] = 4;
  add<<<1, 64>>>(device, 8, 10);
  CUDA(cudaDeviceSynchronize());
  REQUIRE(own[3] == 14);
  CUDA(cudaHostUnregister(own));
  munmap(own, kBytes);
  check::say("a file without a name, and private memory");
}

// This program again, with the descriptor of the file.
static int guest(int file) {
  int* host = mapAll(file);
  const Late late;
  int* device = registered(host, kBytes);
  answerTurns<<<1, 1>>>(device + kGuest, device + kGuest + 1, kTurns, late.flag);
  CUDA(cudaDeviceSynchronize());
  return *late.flag;
}

static void twoProcesses(int file, char* self, int* host, int* device, const Late& late) {
  std::memset(host, 0, kPage);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    char role[] = "--guest";
    std::string number = std::to_string(dup(file));  // which is not closed by execv
    char* arguments[] = {self, role, number.data(), nullptr};
    execv("/proc/self/exe", arguments);
    _exit(3);
  }
  sayTurns<<<1, 1>>>(device + kGuest, device + kGuest + 1, kTurns, late.flag);
  CUDA(cudaDeviceSynchronize());
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  late.verify("kernels of two processes");
  REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char** argv) {
  if (const int file = check::option(argc, argv, "--guest", -1); file >= 0) return guest(file);
  const std::string path = "/dev/shm/gpupool-shared-files-" + std::to_string(getpid());
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  REQUIRE(file >= 0 && ftruncate(file, kBytes) == 0);
  int *first = mapAll(file), *second = mapAll(file);
  const Late late;
  int *deviceFirst = registered(first, kBytes), *deviceSecond = registered(second, kBytes);
  unlink(path.c_str());
  twoProcesses(file, argv[0], first, deviceFirst, late);
  withProcessor(first, deviceFirst, late);
  twoKernels(second, deviceFirst, deviceSecond, late);
  copies(first, second);
  inGraph(first, second);
  CUDA(cudaHostUnregister(first));
  CUDA(cudaHostUnregister(second));
  partOfPages(file);
  otherMemory();
  return check::pass();
}

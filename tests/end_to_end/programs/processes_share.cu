// Two processes share device memory and events: the owner makes them, the guest opens them. By IPC handles
// and by descriptors; what one has written the other one reads, in the order that events give. Handles that
// open nothing are refused. When the owner is killed, the guest keeps what it has opened. What they share
// goes with a reset of either's device.
//   --devices 2   the guest works on the second device, with memory of the first
//   --alone 1     each of the two sees its own device only (CUDA_VISIBLE_DEVICES), as launchers do
//   --pause FILE  with the memory opened the guest writes a handle of it there, and goes on when stdin ends
//   --open FILE   nothing else: that handle is of another tenant, or changed, or its lease has ended, and
//   opens nothing
//   --join FILE   nothing else: that handle is of another program of the tenant, and opens what the guest has
//   written
//   --keep FILE   as --join, and keeps it open until stdin ends; its owner has died then
//   --lend FILE, --borrow FILE   the owner alone, and the guest alone: they meet at that socket, and may be
//   of different leases
//   --host FILE, --visit FILE, --spy FILE   of different leases, tenants and servers:
//   processes_share_visits.cu
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>

#include <string>

#include "processes_share.h"

constexpr int kSmall = 1 << 16, kLarge = 10 << 20;  // of the first one's extent others have a part, too
constexpr int kTurns = 20;
constexpr int kLives = 3;

__global__ void add(int* values, int count, int step) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    values[i] += step;
}
// Takes a while.
__global__ void slowly(int* values, int count, int rounds) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    unsigned value = values[i];
    for (int round = 0; round < rounds; ++round) value = value * 3 + round;
    for (int round = rounds - 1; round >= 0; --round) value = (value - round) * 0xaaaaaaab;  // by 3
    values[i] = static_cast<int>(value + 1);
  }
}

// What is behind it in a stream is not there for some tenths of a second.
__global__ void busy(long long cycles) {
  for (const long long end = clock64() + cycles; clock64() < end;) {
  }
}
static void copyBehindWork(int* values, const std::vector<int>& numbers) {
  busy<<<1, 1>>>(300'000'000);
  CUDA(cudaMemcpy(values, numbers.data(), numbers.size() * sizeof(int), cudaMemcpyHostToDevice));
}

static void refuses(cudaError_t status, const char* what) {
  if (status == cudaSuccess) check::fail("%s was not refused", what);
  cudaGetLastError();
  check::say("%s: refused, error %d", what, static_cast<int>(status));
}

struct Pair {
  int *small = nullptr, *large = nullptr;
};

// ---- the owner ----

static Pair offerMemory() {
  Pair own;
  int* before = nullptr;  // so that the one behind it is not the first of its extent
  CUDA(cudaMalloc(&before, 4096));
  CUDA(cudaMalloc(&own.small, kSmall * sizeof(int)));
  CUDA(cudaMalloc(&own.large, kLarge * sizeof(int)));
  for (const auto& [values, count] : {std::pair(own.small, kSmall), std::pair(own.large, kLarge)}) {
    copyBehindWork(values, counted(count, 0));
    cudaIpcMemHandle_t handle, again;
    CUDA(cudaIpcGetMemHandle(&handle, values));
    CUDA(cudaIpcGetMemHandle(&again, values));
    tell(handle);
    void* opened = nullptr;
    REQUIRE(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess);
    cudaGetLastError();
  }
  hear<char>();  // the guest has added 5
  REQUIRE(contents(own.small, kSmall) == counted(kSmall, 5));
  REQUIRE(contents(own.large, kLarge) == counted(kLarge, 5));
  copyBehindWork(own.small, counted(kSmall, 6));
  tell('w');
  hear<char>();  // the guest has copied the others back
  REQUIRE(contents(own.small, kSmall) == counted(kSmall, 5));
  return own;
}

// One takes turns with the other, and neither waits for its device.
static void takeTurns(int* values, cudaEvent_t mine, cudaEvent_t other, int first) {
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (cudaEvent_t event : {mine, other}) CUDA(cudaStreamWaitEvent(stream, event, 0));
  for (int turn = 0; turn < kTurns; ++turn) {
    if (turn % 2 == first) {
      slowly<<<16, 256, 0, stream>>>(values, kSmall, 50);
      CUDA(cudaEventRecord(mine, stream));
      tell('r');
    } else {
      REQUIRE(hear<char>() == 'r');
      CUDA(cudaStreamWaitEvent(stream, other, 0));
    }
  }
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaStreamDestroy(stream));
}

static void offerEvents(int* values) {
  cudaEvent_t events[2];
  for (cudaEvent_t& event : events) {
    cudaIpcEventHandle_t handle;
    CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
    slowly<<<16, 256>>>(values, kSmall, 50);
    CUDA(cudaEventRecord(event));  // before anybody else has it
    CUDA(cudaIpcGetEventHandle(&handle, event));
    tell(handle);
  }
  takeTurns(values, events[0], events[1], 0);
  hear<char>();
  CUDA(cudaEventSynchronize(events[1]));
  CUDA(cudaEventQuery(events[1]));
  REQUIRE(contents(values, kSmall) == counted(kSmall, 5 + 2 + kTurns));
  for (cudaEvent_t event : events) CUDA(cudaEventDestroy(event));
}

static void offerDescriptor() {
  int descriptor = -1;
  const CUmemGenericAllocationHandle piece = createPiece(descriptor);
  CUmemGenericAllocationHandle own = 0;
  sendDescriptor(descriptor);
  DRIVER(importPiece(own, descriptor));  // in the process that has made it, too
  close(descriptor);
  const CUdeviceptr address = mapPiece(piece, 0, 0);
  DRIVER(cuMemsetD32(address, 41, kPiece / 4));
  DRIVER(cuCtxSynchronize());
  tell('w');
  hear<char>();  // the guest has added 1
  REQUIRE(contents(reinterpret_cast<int*>(address), kPiece / 4) == std::vector<int>(kPiece / 4, 42));
  DRIVER(cuMemRelease(own));
  dropPiece(piece, address);
  tell('f');
}

static void offerPool() {
  cudaMemPoolProps wanted{};
  wanted.allocType = cudaMemAllocationTypePinned;
  wanted.handleTypes = cudaMemHandleTypePosixFileDescriptor;
  wanted.location.type = cudaMemLocationTypeDevice;
  cudaMemPool_t pool;
  int *before = nullptr, *values = nullptr, descriptor = -1;
  CUDA(cudaMemPoolCreate(&pool, &wanted));
  CUDA(cudaMemPoolExportToShareableHandle(&descriptor, pool, cudaMemHandleTypePosixFileDescriptor, 0));
  sendDescriptor(descriptor);
  close(descriptor);
  CUDA(cudaMallocFromPoolAsync(&before, 4096, pool, nullptr));
  CUDA(cudaMallocFromPoolAsync(&values, kSmall * sizeof(int), pool, nullptr));
  const std::vector<int> numbers = counted(kSmall, 0);
  CUDA(cudaMemcpy(values, numbers.data(), kSmall * sizeof(int), cudaMemcpyHostToDevice));
  cudaMemPoolPtrExportData name;
  CUDA(cudaMemPoolExportPointer(&name, values));
  tell(name);
  REQUIRE(hear<char>() == 'a');  // the guest has added 5, and freed what it had opened
  REQUIRE(contents(values, kSmall) == counted(kSmall, 5));
  for (int* memory : {before, values}) CUDA(cudaFreeAsync(memory, nullptr));
  CUDA(cudaStreamSynchronize(nullptr));
  CUDA(cudaMemPoolDestroy(pool));
}

// So much that there is none for the last life unless that of the first has come back.
static void offerUntilReset() {
  CUDA(cudaSetDevice(0));
  size_t idle = 0, total = 0;
  CUDA(cudaMemGetInfo(&idle, &total));
  for (int life = 0; life < kLives; ++life) {
    int* values = nullptr;
    const std::vector<int> numbers = counted(kSmall, life);
    CUDA(cudaMalloc(&values, idle / 5 * 2));
    CUDA(cudaMemcpy(values, numbers.data(), kSmall * sizeof(int), cudaMemcpyHostToDevice));
    cudaIpcMemHandle_t handle;
    CUDA(cudaIpcGetMemHandle(&handle, values));
    tell(handle);
    REQUIRE(hear<char>() == 'r');  // the guest has it no more
    CUDA(cudaDeviceReset());
    tell('r');
  }
}

static int owner() {
  CUDA(cudaSetDevice(0));
  const Pair own = offerMemory();
  offerEvents(own.small);
  offerDescriptor();
  offerPool();
  hear<char>();
  CUDA(cudaFree(own.small));
  tell('f');
  return hear<char>();  // until it is killed
}

// ---- the guest ----

static void openUntilReset(int device) {
  CUDA(cudaSetDevice(device));
  for (int life = 0; life < kLives; ++life) {
    const auto handle = hear<cudaIpcMemHandle_t>();
    void* opened = nullptr;
    for (int turn = 0; turn < 2; ++turn) {
      CUDA(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess));
      int* values = static_cast<int*>(opened);
      REQUIRE(contents(values, kSmall) == counted(kSmall, life + turn));
      add<<<32, 256>>>(values, kSmall, 1);
      CUDA(cudaDeviceSynchronize());
      CUDA(cudaDeviceReset());
    }
    tell('r');
    REQUIRE(hear<char>() == 'r');
    REQUIRE(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess);
    cudaGetLastError();
  }
  check::say("resets: what was opened opens afresh, and what was offered is gone");
}

static int* openMemory(int count, cudaIpcMemHandle_t& handle) {
  handle = hear<cudaIpcMemHandle_t>();
  void *opened = nullptr, *again = nullptr;
  CUDA(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess));
  CUDA(cudaIpcOpenMemHandle(&again, handle, cudaIpcMemLazyEnablePeerAccess));
  REQUIRE(again == opened);
  CUDA(cudaIpcCloseMemHandle(again));
  int* values = static_cast<int*>(opened);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  DRIVER(cuMemGetAddressRange(&base, &bytes, reinterpret_cast<CUdeviceptr>(values + count / 2)));
  REQUIRE(base == reinterpret_cast<CUdeviceptr>(values) && bytes >= count * sizeof(int));
  cudaPointerAttributes attributes;
  CUDA(cudaPointerGetAttributes(&attributes, values));
  int opener = 0;
  CUDA(cudaGetDevice(&opener));
  REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == opener);
  REQUIRE(contents(values, count) == counted(count, 0));
  add<<<32, 256>>>(values, count, 5);
  CUDA(cudaDeviceSynchronize());
  return values;
}

// Natively a device copies what was opened for another one, too, whether it had a context by then or not.
static void copyOnOther(const int* values, int count, int device) {
  int devices = 0;
  CUDA(cudaGetDeviceCount(&devices));
  if (devices < 2) return;
  CUDA(cudaSetDevice(device == 0 ? 1 : 0));
  int* copy = nullptr;
  CUDA(cudaMalloc(&copy, count * sizeof(int)));
  CUDA(cudaMemcpyAsync(copy, values, count * sizeof(int), cudaMemcpyDefault));
  CUDA(cudaDeviceSynchronize());
  REQUIRE(contents(copy, count) == counted(count, 5));
  REQUIRE(contents(values, count) == counted(count, 5));
  CUDA(cudaFree(copy));
  CUDA(cudaSetDevice(device));
}

static void useEvents(int* values) {
  cudaEvent_t events[2];
  for (cudaEvent_t& event : events) {
    CUDA(cudaIpcOpenEventHandle(&event, hear<cudaIpcEventHandle_t>()));
    CUDA(cudaStreamWaitEvent(nullptr, event, 0));
    CUDA(cudaEventSynchronize(event));
  }
  takeTurns(values, events[1], events[0], 1);
  CUDA(cudaEventQuery(events[0]));
  check::same("after turns by events", contents(values, kSmall), counted(kSmall, 5 + 2 + kTurns));
  tell('e');
  for (cudaEvent_t event : events) CUDA(cudaEventDestroy(event));
}

// owner: as the guest counts devices; CU_DEVICE_INVALID: it does not see it.
static void useDescriptor(int device, int owner) {
  const int descriptor = receiveDescriptor();
  CUmemGenericAllocationHandle piece = 0, none = 0;
  DRIVER(importPiece(piece, descriptor));
  close(descriptor);
  int pipes[2];
  REQUIRE(pipe(pipes) == 0);
  REQUIRE(importPiece(none, pipes[0]) != CUDA_SUCCESS);
  CUmemAllocationProp found{};
  DRIVER(cuMemGetAllocationPropertiesFromHandle(&found, piece));
  REQUIRE(found.location.type == CU_MEM_LOCATION_TYPE_DEVICE && found.location.id == owner);
  const CUdeviceptr address = mapPiece(piece, owner < 0 ? device : owner, device);
  int* values = reinterpret_cast<int*>(address);
  REQUIRE(hear<char>() == 'w');
  add<<<32, 256>>>(values, kPiece / 4, 1);
  CUDA(cudaDeviceSynchronize());
  tell('a');
  REQUIRE(hear<char>() == 'f');  // the owner has it no more
  add<<<32, 256>>>(values, kPiece / 4, 1);
  check::same("by a descriptor", contents(values, kPiece / 4), std::vector<int>(kPiece / 4, 43));
  dropPiece(piece, address);
}

static void usePool(int device) {
  const int descriptor = receiveDescriptor();
  cudaMemPool_t pool;
  CUDA(cudaMemPoolImportFromShareableHandle(&pool, reinterpret_cast<void*>(intptr_t{descriptor}),
                                            cudaMemHandleTypePosixFileDescriptor, 0));
  close(descriptor);
  cudaMemAccessDesc access{};
  access.location.type = cudaMemLocationTypeDevice;
  access.location.id = device;
  access.flags = cudaMemAccessFlagsProtReadWrite;
  CUDA(cudaMemPoolSetAccess(pool, &access, 1));
  cudaMemPoolPtrExportData name = hear<cudaMemPoolPtrExportData>(), none{};
  void* opened = nullptr;
  REQUIRE(cudaMemPoolImportPointer(&opened, pool, &none) != cudaSuccess);
  REQUIRE(cudaMallocFromPoolAsync(&opened, 4096, pool, nullptr) != cudaSuccess);
  cudaGetLastError();
  CUDA(cudaMemPoolImportPointer(&opened, pool, &name));
  int* values = static_cast<int*>(opened);
  REQUIRE(contents(values, kSmall) == counted(kSmall, 0));
  add<<<32, 256>>>(values, kSmall, 5);
  check::same("by a pool", contents(values, kSmall), counted(kSmall, 5));
  CUDA(cudaFreeAsync(values, nullptr));
  CUDA(cudaStreamSynchronize(nullptr));
  CUDA(cudaMemPoolDestroy(pool));
  tell('a');
}

// Until whoever watches has seen enough.
static void pauseWith(const char* path, const cudaIpcMemHandle_t& handle) {
  std::FILE* file = std::fopen(path, "wb");
  REQUIRE(file != nullptr && std::fwrite(&handle, sizeof handle, 1, file) == 1 && std::fclose(file) == 0);
  check::say("paused");
  untilStdinEnds();
}

static cudaIpcMemHandle_t readHandle(const char* path) {
  cudaIpcMemHandle_t handle;
  std::FILE* file = std::fopen(path, "rb");
  REQUIRE(file != nullptr && std::fread(&handle, sizeof handle, 1, file) == 1 && std::fclose(file) == 0);
  return handle;
}

static int joinOthers(const char* path) {
  CUDA(cudaSetDevice(0));
  void* opened = nullptr;
  CUDA(cudaIpcOpenMemHandle(&opened, readHandle(path), cudaIpcMemLazyEnablePeerAccess));
  check::same("of another program", contents(static_cast<int*>(opened), kSmall), counted(kSmall, 5));
  CUDA(cudaIpcCloseMemHandle(opened));
  return check::pass();
}

static int keepOpened(const char* path) {
  CUDA(cudaSetDevice(0));
  const cudaIpcMemHandle_t handle = readHandle(path);
  void* opened = nullptr;
  CUDA(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess));
  int* values = static_cast<int*>(opened);
  REQUIRE(contents(values, kSmall) == counted(kSmall, 5));
  check::say("kept");
  untilStdinEnds();
  add<<<32, 256>>>(values, kSmall, 1);
  check::same("after its lease's end", contents(values, kSmall), counted(kSmall, 6));
  CUDA(cudaIpcCloseMemHandle(opened));
  refuses(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess), "an ended lease's handle");
  return check::pass();
}

// Each byte of it matters, or says nothing.
static int openForeign(const char* path) {
  cudaIpcMemHandle_t handle = readHandle(path);
  CUDA(cudaSetDevice(0));
  void* opened = nullptr;
  refuses(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess), "a foreign handle");
  for (char& byte : handle.reserved) {
    byte ^= 1;
    REQUIRE(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess);
    cudaGetLastError();
    byte ^= 1;
  }
  check::Device<int> usable(1000);  // nothing has happened to this process
  add<<<1, 256>>>(usable, 1000, 1);
  CUDA(cudaDeviceSynchronize());
  return check::pass();
}

static const char* text(int argc, char** argv, const char* name) {
  for (int i = 1; i + 1 < argc; ++i)
    if (std::strcmp(argv[i], name) == 0) return argv[i + 1];
  return nullptr;
}

static pid_t peer() {
  ucred found{};
  socklen_t length = sizeof found;
  REQUIRE(getsockopt(line, SOL_SOCKET, SO_PEERCRED, &found, &length) == 0);
  return found.pid;
}

// One that is not this process's child is somebody else's.
static void killOther(pid_t other) {
  kill(other, SIGKILL);
  int status = 0;
  if (waitpid(other, &status, 0) == other) {
    REQUIRE(WIFSIGNALED(status));
    return;
  }
  for (int i = 0; i < 1200 && kill(other, 0) == 0; ++i) usleep(100'000);
  REQUIRE(kill(other, 0) != 0 && errno == ESRCH);
}

static void guest(int device, int owner, pid_t other, const char* pauseFile) {
  CUDA(cudaSetDevice(device));
  cudaIpcMemHandle_t handles[2];
  int* small = openMemory(kSmall, handles[0]);
  copyOnOther(small, kSmall, device);
  int* large = openMemory(kLarge, handles[1]);
  copyOnOther(large, kLarge, device);
  check::say("memory: both are opened, and written to");
  if (pauseFile != nullptr) pauseWith(pauseFile, handles[0]);
  tell('a');
  REQUIRE(hear<char>() == 'w');
  REQUIRE(contents(small, kSmall) == counted(kSmall, 6));
  copyBehindWork(small, counted(kSmall, 5));
  tell('w');
  useEvents(small);
  useDescriptor(device, owner);
  usePool(device);
  CUDA(cudaIpcCloseMemHandle(small));
  refuses(cudaIpcCloseMemHandle(small), "what was closed");
  tell('c');
  REQUIRE(hear<char>() == 'f');
  void* opened = nullptr;
  refuses(cudaIpcOpenMemHandle(&opened, cudaIpcMemHandle_t{}, cudaIpcMemLazyEnablePeerAccess),
          "an empty handle");
  killOther(other);
  add<<<32, 256>>>(large, kLarge, 1);
  check::same("after the owner's death", contents(large, kLarge), counted(kLarge, 6));
  CUDA(cudaIpcCloseMemHandle(large));
  refuses(cudaIpcOpenMemHandle(&opened, handles[1], cudaIpcMemLazyEnablePeerAccess),
          "a dead process's handle");
}

// The one of that place among those that this process would see. Before CUDA.
static void seeOnly(int place) {
  const char* seen = std::getenv("CUDA_VISIBLE_DEVICES");
  std::string rest = seen != nullptr ? seen : "0,1", one;
  for (int i = 0; i <= place; ++i) {
    const size_t end = rest.find(',');
    one = rest.substr(0, end);
    rest = end == std::string::npos ? "" : rest.substr(end + 1);
  }
  setenv("CUDA_VISIBLE_DEVICES", one.c_str(), 1);
}

int main(int argc, char** argv) {
  const int devices = check::option(argc, argv, "--devices", 1);
  const bool alone = check::option(argc, argv, "--alone", 0) != 0;
  if (const char* path = text(argc, argv, "--open")) return openForeign(path);
  if (const char* path = text(argc, argv, "--join")) return joinOthers(path);
  if (const char* path = text(argc, argv, "--keep")) return keepOpened(path);
  if (const char* path = text(argc, argv, "--lend")) {
    line = accepted(listenAt(path));
    return owner();
  }
  if (const char* path = text(argc, argv, "--borrow")) {
    line = connectTo(path);
    guest(0, 0, peer(), nullptr);
    return check::pass();
  }
  if (const char* path = text(argc, argv, "--host")) return host(path);
  if (const char* path = text(argc, argv, "--visit")) return visit(path);
  if (const char* path = text(argc, argv, "--spy")) return spy(path);
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
  const pid_t other = fork();  // before CUDA
  line = ends[other == 0 ? 1 : 0];
  close(ends[other == 0 ? 0 : 1]);
  if (alone) seeOnly(other == 0 ? 0 : devices - 1);
  if (other == 0) {
    offerUntilReset();
    return owner();
  }
  openUntilReset(alone ? 0 : devices - 1);
  guest(alone ? 0 : devices - 1, alone && devices > 1 ? CU_DEVICE_INVALID : 0, other,
        text(argc, argv, "--pause"));
  return check::pass();
}

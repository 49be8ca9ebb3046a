// Memory that another process has: exported here, imported there. The other process is this program again,
// for a forked one could not use the driver.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

namespace {

constexpr size_t kBytes = size_t{4} << 20;
constexpr int kSocket = 3;

#define MUST(condition)                                                    \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: " #condition "\n", __FILE__, __LINE__); \
      _exit(1);                                                            \
    }                                                                      \
  } while (false)

void start() {
  MUST(cuInit(0) == CUDA_SUCCESS);
  CUcontext context = nullptr;
  MUST(cuDevicePrimaryCtxRetain(&context, 1) == CUDA_SUCCESS);
  MUST(cuCtxSetCurrent(context) == CUDA_SUCCESS);
}

size_t freeBytes() {
  size_t free = 0, total = 0;
  MUST(cuMemGetInfo(&free, &total) == CUDA_SUCCESS);
  return free;
}

CUdeviceptr map(CUmemGenericAllocationHandle memory) {
  CUdeviceptr address = 0;
  CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, {1}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  MUST(cuMemAddressReserve(&address, kBytes, 0, 0, 0) == CUDA_SUCCESS);
  MUST(cuMemMap(address, kBytes, 0, memory, 0) == CUDA_SUCCESS);
  MUST(cuMemSetAccess(address, kBytes, &access, 1) == CUDA_SUCCESS);
  return address;
}

void sendDescriptor(int descriptor) {
  char byte = 'd', room[CMSG_SPACE(sizeof(int))] = {};
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  MUST(sendmsg(kSocket, &message, 0) == 1);
}

int receiveDescriptor() {
  char byte = 0, room[CMSG_SPACE(sizeof(int))] = {};
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  int descriptor = -1;
  MUST(recvmsg(kSocket, &message, MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&message) != nullptr);
  std::memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
  return descriptor;
}

void say(char letter) { MUST(write(kSocket, &letter, 1) == 1); }
void hear(char letter) {
  char heard = 0;
  MUST(read(kSocket, &heard, 1) == 1 && heard == letter);
}

CUresult import(CUmemGenericAllocationHandle& memory, int descriptor) {
  return cuMemImportFromShareableHandle(&memory, reinterpret_cast<void*>(intptr_t{descriptor}),
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

// What a process may pass for memory, and must not be mapped.
void refuseOthers() {
  CUmemGenericAllocationHandle memory = 0;
  int pipes[2];
  MUST(pipe(pipes) == 0);
  MUST(import(memory, pipes[0]) == CUDA_ERROR_INVALID_VALUE);
  const int loose = memfd_create("gpupool-soft-1", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  MUST(loose >= 0 && ftruncate(loose, kBytes) == 0);
  MUST(import(memory, loose) == CUDA_ERROR_INVALID_VALUE);  // it could be shrunk
  MUST(import(memory, -1) == CUDA_ERROR_INVALID_VALUE);
}

int importer() {
  start();
  refuseOthers();
  const size_t before = freeBytes();
  const int descriptor = receiveDescriptor();
  MUST(ftruncate(descriptor, 4096) != 0);
  CUmemGenericAllocationHandle memory = 0;
  MUST(import(memory, descriptor) == CUDA_SUCCESS);
  close(descriptor);
  CUmemAllocationProp properties{};
  MUST(cuMemGetAllocationPropertiesFromHandle(&properties, memory) == CUDA_SUCCESS);
  MUST(properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE && properties.location.id == 1);
  const CUdeviceptr address = map(memory);
  MUST(cuMemRelease(memory) == CUDA_SUCCESS);
  MUST(freeBytes() == before);  // it is on the other's account
  int ordinal = -1;
  MUST(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) == CUDA_SUCCESS);
  MUST(ordinal == 1);
  unsigned value = 0;
  MUST(cuMemcpyDtoH(&value, address, sizeof value) == CUDA_SUCCESS && value == 7);
  MUST(cuMemsetD32(address, 8, kBytes / 4) == CUDA_SUCCESS && cuCtxSynchronize() == CUDA_SUCCESS);
  say('w');
  hear('r');  // the other has released it
  MUST(cuMemcpyDtoH(&value, address + kBytes - 4, sizeof value) == CUDA_SUCCESS && value == 8);
  MUST(cuMemUnmap(address, kBytes) == CUDA_SUCCESS);
  MUST(cuMemAddressFree(address, kBytes) == CUDA_SUCCESS);
  MUST(freeBytes() == before);
  say('e');
  return 0;
}

int exporter() {
  start();
  const size_t before = freeBytes();
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {1}};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle memory = 0;
  MUST(cuMemCreate(&memory, kBytes, &properties, 0) == CUDA_SUCCESS);
  const CUdeviceptr address = map(memory);
  MUST(cuMemsetD32(address, 7, kBytes / 4) == CUDA_SUCCESS && cuCtxSynchronize() == CUDA_SUCCESS);
  int descriptor = -1;
  MUST(cuMemExportToShareableHandle(&descriptor, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) ==
       CUDA_SUCCESS);
  sendDescriptor(descriptor);
  close(descriptor);
  hear('w');
  unsigned value = 0;
  MUST(cuMemcpyDtoH(&value, address, sizeof value) == CUDA_SUCCESS && value == 8);
  MUST(freeBytes() == before - kBytes);
  MUST(cuMemUnmap(address, kBytes) == CUDA_SUCCESS && cuMemRelease(memory) == CUDA_SUCCESS);
  MUST(freeBytes() == before);
  say('r');
  hear('e');
  return 0;
}

}  // namespace

int main(int count, char** words) {
  alarm(60);
  if (count > 1) return std::strcmp(words[1], "import") == 0 ? importer() : exporter();
  int ends[2];
  MUST(setenv("GPUPOOL_SOFT_DEVICES", "2", 1) == 0);
  MUST(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  bool well = true;
  pid_t children[2];
  for (int i = 0; i < 2; ++i) {
    children[i] = fork();
    MUST(children[i] >= 0);
    if (children[i] != 0) continue;
    const int mine = fcntl(ends[i], F_DUPFD, 10);  // dup2 to itself would leave it close-on-exec
    MUST(dup2(mine, kSocket) == kSocket);
    close(mine);
    execl("/proc/self/exe", words[0], i == 0 ? "import" : "export", nullptr);
    _exit(127);
  }
  close(ends[0]);
  close(ends[1]);
  for (pid_t child : children) {
    int status = 0;
    MUST(waitpid(child, &status, 0) == child);
    well &= status == 0;
  }
  std::puts(well ? "shared" : "failed");
  return well ? 0 : 1;
}

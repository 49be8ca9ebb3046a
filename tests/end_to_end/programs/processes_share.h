#pragma once
// What the parts of processes_share have in common: the line between two processes, contents, and pieces.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "driver_check.h"

constexpr size_t kPiece = 4 << 20;

// ---- the line ----

inline int line = -1;  // to the other process

inline void send(const void* bytes, size_t count) {
  REQUIRE(write(line, bytes, count) == static_cast<ssize_t>(count));
}
inline void receive(void* bytes, size_t count) {
  for (size_t got = 0; got < count;) {
    const ssize_t more = read(line, static_cast<char*>(bytes) + got, count - got);
    if (more <= 0) std::_Exit(1);  // the other one has said why
    got += static_cast<size_t>(more);
  }
}
template <typename T>
void tell(const T& value) {
  send(&value, sizeof value);
}
template <typename T>
T hear() {
  T value{};
  receive(&value, sizeof value);
  return value;
}

inline void sendDescriptor(int descriptor) {
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
  REQUIRE(sendmsg(line, &message, 0) == 1);
}
inline int receiveDescriptor() {
  char byte = 0, room[CMSG_SPACE(sizeof(int))] = {};
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  int descriptor = -1;
  REQUIRE(recvmsg(line, &message, 0) == 1 && CMSG_FIRSTHDR(&message) != nullptr);
  std::memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
  return descriptor;
}

inline sockaddr_un addressOf(const char* path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  REQUIRE(std::strlen(path) < sizeof address.sun_path);
  std::strcpy(address.sun_path, path);
  return address;
}
inline int listenAt(const char* path) {
  const sockaddr_un address = addressOf(path);
  const int end = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  REQUIRE(end >= 0 && bind(end, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(listen(end, 1) == 0);
  return end;
}
// Both bounded: the other one may not come.
inline int accepted(int listener) {
  pollfd wanted{listener, POLLIN, 0};
  REQUIRE(poll(&wanted, 1, 120'000) == 1);
  const int end = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  REQUIRE(end >= 0);
  return end;
}
inline int connectTo(const char* path) {
  const sockaddr_un address = addressOf(path);
  const int end = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  int attempts = 1200;
  while (connect(end, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 && --attempts > 0)
    usleep(100'000);
  REQUIRE(attempts > 0);
  return end;
}

inline void untilStdinEnds() {
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) == 1) continue;
}

// ---- contents, and pieces ----

inline std::vector<int> contents(const int* values, int count) {
  std::vector<int> got(count);
  CUDA(cudaMemcpy(got.data(), values, count * sizeof(int), cudaMemcpyDeviceToHost));
  return got;
}
inline std::vector<int> counted(int count, int from) {
  std::vector<int> values(count);
  for (int i = 0; i < count; ++i) values[i] = i + from;
  return values;
}

// Of device 0, and its descriptor.
inline CUmemGenericAllocationHandle createPiece(int& descriptor) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle piece = 0;
  DRIVER(cuMemCreate(&piece, kPiece, &wanted, 0));
  DRIVER(cuMemExportToShareableHandle(&descriptor, piece, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  return piece;
}
inline CUresult importPiece(CUmemGenericAllocationHandle& piece, int descriptor) {
  return cuMemImportFromShareableHandle(&piece, reinterpret_cast<void*>(intptr_t{descriptor}),
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}
inline CUdeviceptr mapPiece(CUmemGenericAllocationHandle piece, int owner, int user) {
  CUdeviceptr address = 0;
  CUmemAccessDesc access[2] = {};
  DRIVER(cuMemAddressReserve(&address, kPiece, 0, 0, 0));
  DRIVER(cuMemMap(address, kPiece, 0, piece, 0));
  for (int i = 0; i < 2; ++i) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = i == 0 ? owner : user;
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  DRIVER(cuMemSetAccess(address, kPiece, access, owner == user ? 1 : 2));
  return address;
}
inline void dropPiece(CUmemGenericAllocationHandle piece, CUdeviceptr address) {
  DRIVER(cuMemUnmap(address, kPiece));
  DRIVER(cuMemRelease(piece));
  DRIVER(cuMemAddressFree(address, kPiece));
}

// ---- processes_share_visits.cu ----

int host(const char* path);
int visit(const char* path);
int spy(const char* path);

#pragma once
// Registered memory (cuMemHostRegister): pages of the application. Every registration has a shadow in the
// host arena.
//
// Where the pages are a file's that the application has mapped for other processes, too (MAP_SHARED), and the
// worker is on this host, the shadow is another mapping of the very same pages, in this process and in the
// worker, and is used as pinned memory is. Kernels and processors of several processes that register the file
// see one another's writes at once, as natively.
//
// Other pages the worker cannot map. Asynchronous copies go by way of the shadow (client/memory/carrier.h).
// A kernel cannot address registered memory without having asked for the device's address of it
// (CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM reads 0). Once it did, the memory is mirrored
// instead (client/memory/host.h), which costs a comparison at every launch. Copies to the device then read
// the mirror, and copies from it are staged. Threads: any.

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

#include "client/memory/carrier.h"

namespace gpupool::client {

class RegisteredMemory {
 public:
  // CUDA_ERROR_NOT_SUPPORTED, with a line that says why: a segment of NCCL's, over a network.
  CUresult add(CUcontext context, uint64_t host, size_t bytes, unsigned flags, int device);
  // Waits for its copies under way.
  CUresult remove(uint64_t host);

  // True: [host, + bytes) is a file's pages, which the worker has mapped; its own `address` of them.
  bool shares(uint64_t host, size_t bytes, uint64_t& address) const;
  // True: copies of [host, + bytes) may go by way of the shadow, at `range`.
  bool carries(uint64_t host, size_t bytes, Carrier::Range& range) const;
  // Asynchronous copies between the device and memory that carries.
  CUresult upload(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes);
  CUresult download(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes);

  // A kernel is going to address the memory at `host`.
  void mirror(uint64_t host);
  // A pointer attribute told the device's address of `host`: mirrored once a kernel is given it
  // (noticeAddress).
  void addressTold(uint64_t host);
  bool anyTold() const { return told_.load(std::memory_order_relaxed) != 0; }
  void noticeAddress(uint64_t device);
  void mirrorTold();

 private:
  struct Registration {
    size_t bytes = 0;
    uint64_t shadow = 0;  // where `host` lies in it
    CUcontext context = nullptr;
    bool shared = false;  // its pages are the application's own
    bool mirrored = false, told = false;
  };
  bool share(CUcontext context, uint64_t host, size_t bytes, Registration& fresh);
  using At = std::map<uint64_t, Registration>::iterator;
  At find(uint64_t host);  // under mutex_

  mutable std::mutex mutex_;
  std::map<uint64_t, Registration> registrations_;
  std::atomic<size_t> told_{0};
  std::atomic<size_t> shared_{0};
};

RegisteredMemory& registeredMemory();

// Pinned memory at `address`, if there is any, is addressed by kernels from now on.
void mirrorArena(uint64_t address);
// What the device has finished writing to host memory, carried and mirrored, is in this process's when it
// returns.
CUresult settleHostMemory();
// The same of work that was sent before that word, which has come.
CUresult settleHostMemory(WordMark behind);
// The function reads what the work before it wrote to host memory, and the work behind it what it wrote.
// inGraph: it is a node's, and graphs' own copies are that work too.
void carryBytes(Session::HostFunction& function, bool inGraph = false);

}  // namespace gpupool::client

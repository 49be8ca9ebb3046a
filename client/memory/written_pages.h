#pragma once
// Which pages of this process processors have written since they were protected, as the kernel knows it:
// Linux 6.7 and later (ioctl_userfaultfd(2), UFFD_FEATURE_WP_ASYNC; PAGEMAP_SCAN in the kernel's
// admin-guide/mm/pagemap). A page that is protected costs its next writer a fault, about 1 us. The kernel
// marks what a processor writes, also in system calls, and what begins to be pinned for writing by a device,
// but not what the device writes there later: see onlyProcessorsWrite(). A process that is forked would write
// to memory that both have without being noticed: it can read such memory, and not write to it.
//
// Threads: any.

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace gpupool::client {

class WrittenPages {
 public:
  struct Range {  // whole pages
    uint64_t begin = 0, end = 0;
  };
  static constexpr size_t kPage = 4096;

  // Null: this kernel does not say it, or not to this process; or GPUPOOL_TRACK_WRITES=0.
  static WrittenPages* get();

  // From now on the pages of [address, + bytes), a mapping of the process's own, can be protected. False: not
  // these. unwatch() comes before the mapping ends.
  bool watch(uint64_t address, size_t bytes);
  void unwatch(uint64_t address);
  // What is written from now on is what written() tells. False: it is not watched.
  bool protect(uint64_t address, size_t bytes);
  // What was written in [address, + bytes) since protect(), and what is not protected or not watched, in
  // order. Anything may lie there. False: the kernel does not say it.
  bool written(uint64_t address, size_t bytes, std::vector<Range>& ranges);

  // Of what the process has open: nothing lets a device write into its memory by itself (RDMA, io_uring,
  // files without a cache, devices that are not known). What was pinned before and is not open any more is
  // not seen.
  static bool onlyProcessorsWrite();

 private:
  WrittenPages(int faults, int pagemap) : faults_(faults), pagemap_(pagemap) {}
  static WrittenPages* open();
  const int faults_, pagemap_;
  std::mutex mutex_;
  std::map<uint64_t, size_t> watched_;  // bytes by address
};

}  // namespace gpupool::client

#pragma once
// Which file in memory the program has mapped somewhere: what other processes map too, such as NCCL's
// segments in /dev/shm or tensors that PyTorch's processes share. Threads: any.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transports/descriptor.h"

namespace gpupool::client {

// A line of /proc/self/maps (proc_pid_maps(5)).
struct Mapping {
  uint64_t start = 0, end = 0;
  bool readable = false, writable = false, shared = false;
  uint64_t offset = 0;  // in the file
  uint64_t device = 0;  // as st_dev has it
  uint64_t inode = 0;   // 0: no file
  std::string path;     // as the kernel tells it: with " (deleted)" behind a name that is gone
};
std::optional<Mapping> parseMapping(std::string_view line);

// The first mapping of this process that ends behind `address`: it holds it, or none does.
std::optional<Mapping> mappingAt(uint64_t address);

// Of NCCL's shared-memory transport: memory through which kernels of several processes, or of several GPUs,
// wait for one another. By its name, /dev/shm/nccl-… (NCCL's src/misc/shmutils.cc; seen with 2.28).
bool isSegmentOfNccl(const Mapping& mapping);

struct MappedFile {
  transport::Descriptor descriptor;  // open for reading and writing
  uint64_t offset = 0;
};
// The file whose pages are [address, + bytes), which are whole pages. None: they are not, or not all in one
// mapping that is shared and that may be written to; or this process gets no such descriptor.
std::optional<MappedFile> mappedFile(uint64_t address, size_t bytes);

}  // namespace gpupool::client

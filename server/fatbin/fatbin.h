#pragma once
// Fatbins: the container of nvcc and NVIDIA's libraries, machine code and PTX for several architectures side
// by side, stored or compressed. As observed of nvcc 13.0 and the libraries; there is no manual. The bytes
// come from outside: every length is checked against its container, and what is unpacked is bounded. Pure
// functions, any thread.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace gpupool::fatbin {

inline constexpr uint32_t kMagic = 0xba55ed50;
inline constexpr uint32_t kWrapperMagic = 0x466243b1;
inline constexpr uint32_t kElfMagic = 0x464c457f;
inline constexpr uint16_t kPtx = 1, kElf = 2;
inline constexpr uint64_t kLz4 = 0x2000, kZstd = 0x8000;  // flags of an entry

// nvcc's handle on a fatbin. auxiliary, version 2: a null-terminated array of the fatbins it was linked from.
struct Wrapper {
  uint32_t magic = kWrapperMagic, version = 1;
  const void* data = nullptr;
  const void* const* auxiliary = nullptr;
};
static_assert(sizeof(Wrapper) == 24);

struct Header {
  uint32_t magic;
  uint16_t version, headerBytes;
  uint64_t bodyBytes;
};
static_assert(sizeof(Header) == 16);

struct EntryHeader {
  uint16_t kind, version;
  uint32_t headerBytes;
  uint32_t payloadBytes;  // with padding
  uint32_t unknown;
  uint32_t compressedBytes, optionsOffset;
  uint16_t minor, major;
  uint32_t arch;  // compute capability × 10
  uint32_t nameOffset, nameBytes;
  uint64_t flags;
  uint64_t reserved;
  uint64_t plainBytes;
};
static_assert(sizeof(EntryHeader) == 64);

struct Entry {
  EntryHeader header;
  std::span<const std::byte> payload;
};

// The entries of the fatbin that `bytes` begin with. False: none, or one of its lengths leads beyond them.
bool readEntries(std::span<const std::byte> bytes, std::vector<Entry>& entries);
// Whether the bytes begin with a fatbin that lies within them.
bool fits(std::span<const std::byte> bytes);

inline constexpr uint64_t kMostPlain = uint64_t{1} << 30;
// The entry's code, unpacked. False: damaged, or larger than `most`.
bool expand(const Entry& entry, std::vector<std::byte>& plain, uint64_t most = kMostPlain);

// Shows `look` the code that the driver would choose of this image on a device of `architecture`, unpacked,
// until it answers false. The image: a fatbin, machine code or PTX. There are several pieces where some are
// alike to the container, and none if the driver will refuse the image. False: so answered `look`, or the
// image cannot be read.
bool eachChosen(std::span<const std::byte> image, unsigned architecture,
                const std::function<bool(std::span<const std::byte>)>& look);

// May kernels of this image print, on a device of this architecture? The image: a fatbin, machine code or
// PTX. Looks at what the driver would choose of a fatbin; what cannot be read may print.
bool mayPrint(std::span<const std::byte> image, unsigned architecture);

}  // namespace gpupool::fatbin

// The container formats of image.h, as observed of nvcc 13.0 and NVIDIA's libraries.
#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "server/softgpu/api/device.h"
#include "server/softgpu/api/image.h"

namespace gpupool::softgpu::api {
namespace {

constexpr uint32_t kWrapperMagic = 0x466243b1;
constexpr uint32_t kFatbinMagic = 0xba55ed50;
constexpr uint32_t kElfMagic = 0x464c457f;
constexpr uint16_t kKindPtx = 1;
constexpr uint64_t kLz4 = 0x2000, kZstd = 0x8000;
constexpr uint64_t kMaxPtx = 1ull << 30;
constexpr double kNewestPtx = 9.0;  // of the driver version reported

struct Wrapper {
  uint32_t magic, version;
  const void* data;
  const void* auxiliary;
};

struct Header {
  uint32_t magic;
  uint16_t version, headerBytes;
  uint64_t bodyBytes;
};
static_assert(sizeof(Header) == 16);

struct Entry {
  uint16_t kind, version;
  uint32_t headerBytes;
  uint32_t payloadBytes;  // with padding
  uint32_t unknown;
  uint32_t compressedBytes, optionsOffset;
  uint16_t minor, major;
  uint32_t arch;
  uint32_t nameOffset, nameBytes;
  uint64_t flags;
  uint64_t reserved;
  uint64_t plainBytes;
};
static_assert(sizeof(Entry) == 64);

// Entries of PTX are followed by a record of compiler options, here an empty one; the real driver wants it
// there.
struct Options {
  uint32_t textOffset, textBytes, reserved[2];
};
constexpr uint32_t kEntryHeader = sizeof(Entry) + sizeof(Options);

template <class T>
T at(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

bool expand(const Entry& entry, const std::byte* payload, std::string& text) {
  uint64_t stored = entry.compressedBytes ? entry.compressedBytes : entry.payloadBytes;
  if (stored > entry.payloadBytes || entry.plainBytes > kMaxPtx || stored > kMaxPtx) return false;
  auto* source = reinterpret_cast<const char*>(payload);
  if (entry.flags & (kLz4 | kZstd)) {
    text.resize(entry.plainBytes);
    if (entry.flags & kLz4) {
      int got = LZ4_decompress_safe(source, text.data(), int(stored), int(text.size()));
      if (got < 0 || uint64_t(got) != entry.plainBytes) return false;
    } else {
      size_t got = ZSTD_decompress(text.data(), text.size(), source, stored);
      if (ZSTD_isError(got) || got != entry.plainBytes) return false;
    }
  } else {
    text.assign(source, stored);
  }
  // Texts end at their first zero: payloads are padded with them.
  if (size_t end = text.find('\0'); end != std::string::npos) text.resize(end);
  return true;
}

struct Candidate {
  Entry entry;
  const std::byte* payload;
};

std::string cannotRun(bool anyPtx) {
  return anyPtx ? "the image holds PTX only for devices newer than compute capability 9.0"
                : "the image holds machine code only; the software GPU runs PTX (compile with "
                  "-gencode arch=compute_75,code=compute_75)";
}

}  // namespace

CUresult readFatbin(const void* image, uint64_t limit, CodeImage& code, std::string& log) {
  auto* bytes = static_cast<const std::byte*>(image);
  if (limit < sizeof(Header)) return CUDA_ERROR_INVALID_IMAGE;
  auto header = at<Header>(bytes);
  if (header.magic != kFatbinMagic || header.headerBytes < sizeof(Header)) return CUDA_ERROR_INVALID_IMAGE;
  if (header.headerBytes > limit || header.bodyBytes > limit - header.headerBytes)
    return CUDA_ERROR_INVALID_IMAGE;
  std::vector<Candidate> best;
  bool anyPtx = false;
  uint64_t offset = header.headerBytes, end = offset + header.bodyBytes;
  while (end - offset >= sizeof(Entry)) {
    auto entry = at<Entry>(bytes + offset);
    if (entry.headerBytes < sizeof(Entry) || entry.headerBytes > end - offset ||
        entry.payloadBytes > end - offset - entry.headerBytes) {
      log = "a fatbin entry reaches beyond its container";
      return CUDA_ERROR_INVALID_IMAGE;
    }
    if (entry.kind == kKindPtx) {
      anyPtx = true;
      if (entry.arch <= kComputeCapability && (best.empty() || entry.arch >= best.front().entry.arch)) {
        if (!best.empty() && entry.arch > best.front().entry.arch) best.clear();
        best.push_back({entry, bytes + offset + entry.headerBytes});
      }
    }
    offset += entry.headerBytes + entry.payloadBytes;
  }
  if (best.empty()) {
    log = cannotRun(anyPtx);
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  for (auto& candidate : best) {
    std::string text;
    if (!expand(candidate.entry, candidate.payload, text)) {
      log = "a compressed PTX entry is damaged";
      return CUDA_ERROR_INVALID_IMAGE;
    }
    code.ptx.push_back(std::move(text));
  }
  return CUDA_SUCCESS;
}

namespace {

CUresult readBare(const void* image, CodeImage& code, std::string& log) {
  auto header = at<Header>(static_cast<const std::byte*>(image));
  return readFatbin(image, header.headerBytes + header.bodyBytes, code, log);
}

// What a PTX text says of itself, as far as loading depends on it.
struct Directives {
  double version = 0;
  unsigned target = 0;
};

// The first .version and .target outside comments.
Directives readDirectives(const std::string& ptx) {
  Directives found;
  for (size_t i = 0; i < ptx.size() && !found.target; ++i) {
    if (ptx.compare(i, 2, "//") == 0) {
      i = std::min(ptx.find('\n', i), ptx.size());
    } else if (ptx.compare(i, 2, "/*") == 0) {
      i = std::min(ptx.find("*/", i), ptx.size());
    } else if (ptx.compare(i, 8, ".version") == 0) {
      found.version = std::strtod(ptx.c_str() + i + 8, nullptr);
    } else if (ptx.compare(i, 7, ".target") == 0) {
      size_t number = ptx.find("sm_", i);
      if (number != std::string::npos)
        found.target = unsigned(std::strtoul(ptx.c_str() + number + 3, nullptr, 10));
      break;
    }
  }
  return found;
}

CUresult readText(const char* text, CodeImage& code, std::string& log) {
  std::string ptx(text);
  Directives directives = readDirectives(ptx);
  if (!directives.version) {
    log = "neither a fatbin nor PTX: there is no .version";
    return CUDA_ERROR_INVALID_IMAGE;
  }
  if (directives.version > kNewestPtx) {
    log = "PTX " + std::to_string(directives.version) + " is newer than 9.0";
    return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
  }
  if (directives.target > kComputeCapability) {
    log = "PTX for sm_" + std::to_string(directives.target) + " cannot run on compute capability 9.0";
    return CUDA_ERROR_INVALID_PTX;
  }
  code.ptx.push_back(std::move(ptx));
  return CUDA_SUCCESS;
}

// nvcc -rdc=true: `data` is the linked machine code (or nothing), the PTX is in the fatbins it was linked
// from. Those without usable PTX are left out (the device runtime library, which most programs do not use);
// if a program needs them, linking says which symbol is missing.
CUresult readLinked(const Wrapper& wrapper, CodeImage& code, std::string& log) {
  bool any = false;
  CUresult last = CUDA_ERROR_NO_BINARY_FOR_GPU;
  auto* parts = static_cast<const void* const*>(wrapper.auxiliary);
  for (; parts && *parts; ++parts) {
    CUresult result = readImage(*parts, code, log);
    if (result == CUDA_SUCCESS) {
      any = true;
    } else if (result != CUDA_ERROR_NO_BINARY_FOR_GPU) {
      return result;
    } else {
      last = result;
    }
  }
  if (any) log.clear();
  return any ? CUDA_SUCCESS : last;
}

}  // namespace

CUresult readImage(const void* image, CodeImage& code, std::string& log) {
  auto* bytes = static_cast<const unsigned char*>(image);
  // Text first: it may be shorter than a magic number.
  bool text = bytes[0] == '\t' || bytes[0] == '\n' || bytes[0] == '\r' || bytes[0] == ' ' ||
              bytes[0] == '/' || bytes[0] == '.';
  if (text) return readText(reinterpret_cast<const char*>(bytes), code, log);
  if (!bytes[0]) return CUDA_ERROR_INVALID_IMAGE;
  switch (bytes[1] && bytes[2] ? at<uint32_t>(reinterpret_cast<const std::byte*>(bytes)) : 0) {
    case kWrapperMagic: {
      auto wrapper = at<Wrapper>(reinterpret_cast<const std::byte*>(bytes));
      if (wrapper.version == 2) return readLinked(wrapper, code, log);
      return wrapper.data ? readBare(wrapper.data, code, log) : CUDA_ERROR_INVALID_IMAGE;
    }
    case kFatbinMagic:
      return readBare(image, code, log);
    case kElfMagic:
      log = cannotRun(false);
      return CUDA_ERROR_NO_BINARY_FOR_GPU;
    default:
      log = "neither a fatbin nor PTX";
      return CUDA_ERROR_INVALID_IMAGE;
  }
}

std::vector<std::byte> writeFatbin(const std::vector<std::string>& ptx) {
  auto padded = [](const std::string& text) { return uint32_t((text.size() + 1 + 7) / 8 * 8); };
  Header header{kFatbinMagic, 1, sizeof(Header), 0};
  for (auto& text : ptx) header.bodyBytes += kEntryHeader + padded(text);
  std::vector<std::byte> out(sizeof header + header.bodyBytes);
  std::memcpy(out.data(), &header, sizeof header);
  size_t offset = sizeof header;
  for (auto& text : ptx) {
    Entry entry{};
    entry.kind = kKindPtx;
    entry.version = 0x0101;
    entry.headerBytes = kEntryHeader;
    entry.payloadBytes = padded(text);
    entry.optionsOffset = sizeof(Entry);
    entry.major = 8;
    entry.arch = kComputeCapability;
    entry.flags = 0x11;  // 64-bit, Linux
    Options options{sizeof(Entry) + 8, 0, {}};
    std::memcpy(out.data() + offset, &entry, sizeof entry);
    std::memcpy(out.data() + offset + sizeof entry, &options, sizeof options);
    std::memcpy(out.data() + offset + kEntryHeader, text.data(), text.size());
    offset += kEntryHeader + entry.payloadBytes;
  }
  return out;
}

}  // namespace gpupool::softgpu::api

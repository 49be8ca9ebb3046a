// The container formats of image.h: which of its texts an image runs by, and how an image of texts is made.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "server/fatbin/fatbin.h"
#include "server/softgpu/api/device.h"
#include "server/softgpu/api/image.h"

namespace gpupool::softgpu::api {
namespace {

using fatbin::EntryHeader;
using fatbin::Header;
// Every toolkit of CUDA 13 writes 9.x, and an instruction the translator lacks is refused by name.
constexpr unsigned kNewestPtxMajor = 9;

// Entries of PTX are followed by a record of compiler options, here an empty one; the real driver wants it
// there.
struct Options {
  uint32_t textOffset, textBytes, reserved[2];
};
constexpr uint32_t kEntryHeader = sizeof(EntryHeader) + sizeof(Options);

template <class T>
T at(const void* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

std::string cannotRun(bool anyPtx) {
  return anyPtx ? "the image holds PTX only for devices newer than compute capability 9.0"
                : "the image holds machine code only; the software GPU runs PTX (compile with "
                  "-gencode arch=compute_75,code=compute_75)";
}

}  // namespace

CUresult readFatbin(const void* image, uint64_t limit, CodeImage& code, std::string& log) {
  std::vector<fatbin::Entry> entries;
  if (!fatbin::readEntries({static_cast<const std::byte*>(image), limit}, entries)) {
    log = "a fatbin entry reaches beyond its container";
    return CUDA_ERROR_INVALID_IMAGE;
  }
  std::vector<const fatbin::Entry*> best;
  bool anyPtx = false;
  for (const auto& entry : entries) {
    if (entry.header.kind != fatbin::kPtx) continue;
    anyPtx = true;
    const uint32_t arch = entry.header.arch;
    if (arch > kComputeCapability || (!best.empty() && arch < best.front()->header.arch)) continue;
    if (!best.empty() && arch > best.front()->header.arch) best.clear();
    best.push_back(&entry);
  }
  if (best.empty()) {
    log = cannotRun(anyPtx);
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  std::vector<std::byte> plain;
  for (const auto* entry : best) {
    if (!fatbin::expand(*entry, plain)) {
      log = "a compressed PTX entry is damaged";
      return CUDA_ERROR_INVALID_IMAGE;
    }
    // Texts end at their first zero: payloads are padded with them.
    const auto end = std::find(plain.begin(), plain.end(), std::byte{0});
    code.ptx.emplace_back(reinterpret_cast<const char*>(plain.data()), end - plain.begin());
  }
  return CUDA_SUCCESS;
}

namespace {

CUresult readBare(const void* image, CodeImage& code, std::string& log) {
  auto header = at<Header>(image);
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
  if (directives.version >= kNewestPtxMajor + 1) {
    log = "the PTX version is newer than " + std::to_string(kNewestPtxMajor) + ".x, which CUDA 13 writes";
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
CUresult readLinked(const fatbin::Wrapper& wrapper, CodeImage& code, std::string& log) {
  bool any = false;
  CUresult last = CUDA_ERROR_NO_BINARY_FOR_GPU;
  for (auto* parts = wrapper.auxiliary; parts && *parts; ++parts) {
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
  switch (bytes[1] && bytes[2] ? at<uint32_t>(bytes) : 0) {
    case fatbin::kWrapperMagic: {
      auto wrapper = at<fatbin::Wrapper>(bytes);
      if (wrapper.version == 2) return readLinked(wrapper, code, log);
      return wrapper.data ? readBare(wrapper.data, code, log) : CUDA_ERROR_INVALID_IMAGE;
    }
    case fatbin::kMagic:
      return readBare(image, code, log);
    case fatbin::kElfMagic:
      log = cannotRun(false);
      return CUDA_ERROR_NO_BINARY_FOR_GPU;
    default:
      log = "neither a fatbin nor PTX";
      return CUDA_ERROR_INVALID_IMAGE;
  }
}

std::vector<std::byte> writeFatbin(const std::vector<std::string>& ptx) {
  auto padded = [](const std::string& text) { return uint32_t((text.size() + 1 + 7) / 8 * 8); };
  Header header{fatbin::kMagic, 1, sizeof(Header), 0};
  for (auto& text : ptx) header.bodyBytes += kEntryHeader + padded(text);
  std::vector<std::byte> out(sizeof header + header.bodyBytes);
  std::memcpy(out.data(), &header, sizeof header);
  size_t offset = sizeof header;
  for (auto& text : ptx) {
    EntryHeader entry{};
    entry.kind = fatbin::kPtx;
    entry.version = 0x0101;
    entry.headerBytes = kEntryHeader;
    entry.payloadBytes = padded(text);
    entry.optionsOffset = sizeof(EntryHeader);
    entry.major = 8;
    entry.arch = kComputeCapability;
    entry.flags = 0x11;  // 64-bit, Linux
    Options options{sizeof(EntryHeader) + 8, 0, {}};
    std::memcpy(out.data() + offset, &entry, sizeof entry);
    std::memcpy(out.data() + offset + sizeof entry, &options, sizeof options);
    std::memcpy(out.data() + offset + kEntryHeader, text.data(), text.size());
    offset += kEntryHeader + entry.payloadBytes;
  }
  return out;
}

}  // namespace gpupool::softgpu::api

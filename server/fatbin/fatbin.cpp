#include "server/fatbin/fatbin.h"

#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace gpupool::fatbin {
namespace {

constexpr uint64_t kLz4Most = 255;  // plain bytes per packed one

template <class T>
T at(std::span<const std::byte> bytes, size_t offset = 0) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// Kernels print by calling this function of the driver, under its own name in PTX and machine code alike.
bool callsPrintf(std::span<const std::byte> code) {
  const std::string_view text(reinterpret_cast<const char*>(code.data()), code.size());
  constexpr std::string_view kName = "vprintf";
  return !text.empty() && ::memmem(text.data(), text.size(), kName.data(), kName.size()) != nullptr;
}

// What the driver chooses: machine code for the newest architecture of this generation that is not newer than
// the device, else the newest PTX. Suffixes (sm_90a) do not show in `arch`, so several may qualify: all are
// taken.
std::vector<const Entry*> chosen(const std::vector<Entry>& entries, unsigned architecture) {
  std::vector<const Entry*> best;
  for (const uint16_t kind : {kElf, kPtx}) {
    for (const Entry& entry : entries) {
      const uint32_t arch = entry.header.arch;
      if (entry.header.kind != kind || arch > architecture) continue;
      if (kind == kElf && arch / 10 != architecture / 10) continue;
      if (!best.empty() && arch < best.front()->header.arch) continue;
      if (!best.empty() && arch > best.front()->header.arch) best.clear();
      best.push_back(&entry);
    }
    if (!best.empty()) break;
  }
  return best;
}

}  // namespace

bool fits(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(Header)) return false;
  const auto header = at<Header>(bytes);
  return header.magic == kMagic && header.headerBytes >= sizeof header &&
         header.headerBytes <= bytes.size() && header.bodyBytes <= bytes.size() - header.headerBytes;
}

bool readEntries(std::span<const std::byte> bytes, std::vector<Entry>& entries) {
  if (!fits(bytes)) return false;
  const auto header = at<Header>(bytes);
  bytes = bytes.subspan(header.headerBytes, header.bodyBytes);
  while (bytes.size() >= sizeof(EntryHeader)) {
    const auto entry = at<EntryHeader>(bytes);
    if (entry.headerBytes < sizeof entry || entry.headerBytes > bytes.size() ||
        entry.payloadBytes > bytes.size() - entry.headerBytes)
      return false;
    entries.push_back({entry, bytes.subspan(entry.headerBytes, entry.payloadBytes)});
    bytes = bytes.subspan(size_t{entry.headerBytes} + entry.payloadBytes);
  }
  return true;
}

bool expand(const Entry& entry, std::vector<std::byte>& plain, uint64_t most) {
  const EntryHeader& header = entry.header;
  const uint64_t stored = header.compressedBytes != 0 ? header.compressedBytes : entry.payload.size();
  if (stored > entry.payload.size() || stored > LZ4_MAX_INPUT_SIZE) return false;
  const auto source = entry.payload.first(stored);
  if ((header.flags & (kLz4 | kZstd)) == 0) {
    if (stored > most) return false;
    plain.assign(source.begin(), source.end());
    return true;
  }
  if (header.plainBytes > std::min<uint64_t>(most, LZ4_MAX_INPUT_SIZE)) return false;
  // Before memory is taken for it: the length must be one that these bytes can have.
  const bool lz4 = (header.flags & kLz4) != 0;
  const auto frame = lz4 ? ZSTD_CONTENTSIZE_UNKNOWN : ZSTD_getFrameContentSize(source.data(), source.size());
  if (lz4 ? header.plainBytes / kLz4Most > stored
          : frame != ZSTD_CONTENTSIZE_UNKNOWN && frame != header.plainBytes)
    return false;
  plain.resize(header.plainBytes);
  if (lz4) {
    const int got = LZ4_decompress_safe(reinterpret_cast<const char*>(source.data()),
                                        reinterpret_cast<char*>(plain.data()), static_cast<int>(stored),
                                        static_cast<int>(plain.size()));
    return got >= 0 && static_cast<uint64_t>(got) == header.plainBytes;
  }
  const size_t got = ZSTD_decompress(plain.data(), plain.size(), source.data(), source.size());
  return ZSTD_isError(got) == 0 && got == header.plainBytes;
}

bool eachChosen(std::span<const std::byte> image, unsigned architecture,
                const std::function<bool(std::span<const std::byte>)>& look) {
  if (image.size() < sizeof(uint32_t) || at<uint32_t>(image) != kMagic) return look(image);
  std::vector<Entry> entries;
  if (!readEntries(image, entries)) return false;
  std::vector<std::byte> plain;
  for (const Entry* entry : chosen(entries, architecture)) {
    const bool packed = (entry->header.flags & (kLz4 | kZstd)) != 0;
    if (packed && !expand(*entry, plain)) return false;
    if (!look(packed ? std::span<const std::byte>(plain) : entry->payload)) return false;
  }
  return true;
}

bool mayPrint(std::span<const std::byte> image, unsigned architecture) {
  return !eachChosen(image, architecture, [](std::span<const std::byte> code) { return !callsPrintf(code); });
}

}  // namespace gpupool::fatbin

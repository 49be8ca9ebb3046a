#include "client/visible_devices.h"

#include <strings.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace gpupool::client {
namespace {

// A GPU that has no MIG instances answers to either prefix (measured, driver 580).
constexpr std::string_view kUuidPrefixes[] = {"GPU-", "MIG-"};

bool startsAsUuid(std::string_view entry) {
  return std::ranges::any_of(kUuidPrefixes,
                             [&](std::string_view prefix) { return entry.starts_with(prefix); });
}

std::string uuidText(const CUuuid& uuid) {
  std::string text;
  for (int i = 0; i < 16; ++i) {
    char digits[4];
    std::snprintf(digits, sizeof digits, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                  static_cast<unsigned>(static_cast<unsigned char>(uuid.bytes[i])));
    text += digits;
  }
  return text;
}

// Text after a complete UUID does not count (measured), nor does case.
bool beginsUuid(std::string_view text, std::string_view uuid) {
  const size_t length = std::min(text.size(), uuid.size());
  return std::equal(text.begin(), text.begin() + static_cast<ptrdiff_t>(length), uuid.begin(),
                    [](char a, char b) { return std::tolower(static_cast<unsigned char>(a)) == b; });
}

std::optional<int> byUuid(std::string_view entry, std::span<const CUuuid> devices) {
  if (!startsAsUuid(entry)) return {};
  entry.remove_prefix(kUuidPrefixes[0].size());  // they are equally long
  if (entry.empty()) return {};
  std::optional<int> found;
  for (size_t i = 0; i < devices.size(); ++i) {
    if (!beginsUuid(entry, uuidText(devices[i]))) continue;
    if (found) return {};  // ambiguous
    found = static_cast<int>(i);
  }
  return found;
}

std::optional<int> byOrdinal(const std::string& entry, size_t count) {
  char* end = nullptr;
  const long ordinal = std::strtol(entry.c_str(), &end, 0);
  if (end == entry.c_str() || ordinal < 0 || ordinal >= static_cast<long>(count)) return {};
  return static_cast<int>(ordinal);
}

}  // namespace

CUresult visibleDevices(const char* value, std::span<const CUuuid> devices, std::vector<int>* chosen) {
  chosen->clear();
  if (value == nullptr) {
    for (size_t i = 0; i < devices.size(); ++i) chosen->push_back(static_cast<int>(i));
    return chosen->empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
  }
  const bool uuids = startsAsUuid(value);
  for (std::string_view rest = value;;) {
    const size_t comma = rest.find(',');
    const std::string_view entry = rest.substr(0, comma);
    const auto device = uuids ? byUuid(entry, devices) : byOrdinal(std::string(entry), devices.size());
    if (!device) break;
    if (std::find(chosen->begin(), chosen->end(), *device) != chosen->end()) return CUDA_ERROR_INVALID_DEVICE;
    chosen->push_back(*device);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return chosen->empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

bool namesNoDevice(const char* value) {
  if (value == nullptr) return false;
  const std::string first(value, std::strcspn(value, ","));
  if (startsAsUuid(first)) return first.size() == kUuidPrefixes[0].size();
  return !byOrdinal(first, std::numeric_limits<int>::max());
}

CUmoduleLoadingMode moduleLoadingMode(const char* value) {
  return value != nullptr && strcasecmp(value, "EAGER") == 0 ? CU_MODULE_EAGER_LOADING
                                                             : CU_MODULE_LAZY_LOADING;
}

CUresult checkDeviceOrder(const char* value) {
  if (value == nullptr || *value == '\0') return CUDA_SUCCESS;
  const bool known = strcasecmp(value, "FASTEST_FIRST") == 0 || strcasecmp(value, "PCI_BUS_ID") == 0;
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

}  // namespace gpupool::client

#include "pool-manager/device_filter.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

#include "base/options.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostText = 200;

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(' '), last = text.find_last_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

uint32_t parseCompute(const std::string& text) {
  const size_t point = text.find('.');
  const std::string minor = point == std::string::npos ? "0" : text.substr(point + 1);
  const uint32_t high = options::parseCount(text.substr(0, point)), low = options::parseCount(minor);
  if (high > 999 || low > 999) throw options::OptionError("no compute capability");
  return 1000 * high + low;
}

void addCondition(const std::string& term, size_t sign, DeviceFilter& filter) {
  const std::string what = lower(trimmed(term.substr(0, sign))), value = trimmed(term.substr(sign + 2));
  const bool least = term[sign] == '>';
  if (what == "memory") {
    const uint64_t bytes = options::parseBytes(value).value;
    if (least) filter.leastMemory = std::max(filter.leastMemory, bytes);
    if (!least) filter.mostMemory = std::min(filter.mostMemory, bytes);
  } else if (what == "compute") {
    const uint32_t version = parseCompute(value);
    if (least) filter.leastCompute = std::max(filter.leastCompute, version);
    if (!least) filter.mostCompute = std::min(filter.mostCompute, version);
  } else {
    throw options::OptionError("a GPU has memory and compute, and no '" + what + "'");
  }
}

void addTerm(const std::string& term, DeviceFilter& filter) {
  if (term.empty()) throw options::OptionError("a name or a condition is missing");
  const size_t sign = term.find_first_of("<>=");
  if (sign == std::string::npos) return filter.names.push_back(lower(term));
  if (term.compare(sign, 2, ">=") != 0 && term.compare(sign, 2, "<=") != 0)
    throw options::OptionError("a condition has >= or <=");
  addCondition(term, sign, filter);
}

}  // namespace

bool DeviceFilter::matches(const Device& device) const {
  const uint64_t compute = uint64_t{1000} * device.computeMajor + device.computeMinor;
  if (device.memoryBytes < leastMemory || device.memoryBytes > mostMemory) return false;
  if (compute < leastCompute || compute > mostCompute) return false;
  if (names.empty()) return true;
  const std::string name = lower(device.name);
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& part) { return name.find(part) != std::string::npos; });
}

DeviceFilter parseDeviceFilter(const std::string& text) try {
  DeviceFilter filter;
  if (text.empty()) return filter;
  if (text.size() > kMostText) throw options::OptionError("too long");
  filter.text = text;
  for (size_t from = 0; from <= text.size();) {
    const size_t comma = std::min(text.find(',', from), text.size());
    addTerm(trimmed(text.substr(from, comma - from)), filter);
    from = comma + 1;
  }
  return filter;
} catch (const options::OptionError& error) {
  throw std::invalid_argument("--gpu: '" + text.substr(0, kMostText) + "': " + error.what() +
                              " (examples: h200; memory>=80GiB,compute>=9.0)");
}

}  // namespace gpupool::pool

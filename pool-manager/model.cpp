#include "pool-manager/model.h"

#include <cstdio>
#include <ctime>
#include <fstream>
#include <span>

#include "base/hmac.h"

namespace gpupool::pool {

Id randomId() {
  Id id;
  randomBytes(std::as_writable_bytes(std::span(&id, 1)));
  return id;
}

std::string toText(const Id& id) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(id.high),
                static_cast<unsigned long long>(id.low));
  return text;
}

bool fromText(const std::string& text, Id& id) {
  if (text.size() != 32 || text.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
  id.high = std::stoull(text.substr(0, 16), nullptr, 16);
  id.low = std::stoull(text.substr(16), nullptr, 16);
  return true;
}

std::string printable(const std::string& text, size_t limit) {
  std::string out = text.substr(0, limit);
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return out;
}

std::string bootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  return std::getline(file, id) ? id : "unknown";
}

uint64_t bootTimeMs() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1'000'000;
}

}  // namespace gpupool::pool

#include "pool-manager/model.h"

#include <ctime>
#include <fstream>

namespace gpupool::pool {

const char* name(Priority priority) {
  constexpr const char* kNames[] = {"low", "normal", "high"};
  return priority <= Priority::high ? kNames[static_cast<uint32_t>(priority)] : "unknown";
}

const char* name(TurnPlace place) {
  constexpr const char* kNames[] = {"resident", "aside", "waiting"};
  return place <= TurnPlace::waiting ? kNames[static_cast<uint32_t>(place)] : "unknown";
}

const char* name(Policy policy) {
  constexpr const char* kNames[] = {"pack", "spread"};
  return policy <= Policy::spread ? kNames[static_cast<uint32_t>(policy)] : "unknown";
}

const char* name(Outlook outlook) {
  constexpr const char* kNames[] = {"now", "devices", "queue", "server", "operator", "never", "quota"};
  return outlook <= Outlook::quota ? kNames[static_cast<uint32_t>(outlook)] : "unknown";
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

uint64_t calendarMs() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1'000'000;
}

std::string utcText(uint64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm utc{};
  gmtime_r(&time, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%F %H:%M UTC", &utc);
  return text;
}

}  // namespace gpupool::pool

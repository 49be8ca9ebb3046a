#pragma once
// How much of the pool each tenant may have, and how much it has had of what is counted over time. Times are
// of the calendar: windows are days, weeks from Monday on, or months, in UTC. One thread.

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pool-manager/store/store.h"

namespace gpupool::pool {

inline const std::string kQuotaPrefix = "quota/", kHoursPrefix = "hours/";
inline constexpr char kEveryTenant[] = "*";  // who has no quota of its own has this one's
inline constexpr size_t kMostQuotas = 10'000;

enum class QuotaWindow : uint32_t { day, week, month };
inline constexpr unsigned kQuotaWindows = 3;
const char* name(QuotaWindow window);  // "day"
std::optional<QuotaWindow> windowOf(const std::string& name);

// As in administration.capnp; 0: as much as there is.
struct Quota {
  std::string tenant;
  uint64_t milliDevices = 0, memoryBytes = 0, deviceSeconds = 0;
  QuotaWindow window = QuotaWindow::month;
  uint32_t protectMs = 0;  // no limit: how its leases are protected that name nothing else; 0: they are not

  bool none() const { return milliDevices == 0 && memoryBytes == 0 && deviceSeconds == 0 && protectMs == 0; }
};
inline constexpr uint32_t kLeastProtectMs = 1000, kMostProtectMs = 24 * 3600 * 1000;  // between checkpoints

// "2 GPUs, 100 GiB, 50 GPU-hours a month; its leases are protected, every 30s"; for people.
std::string describe(const Quota& quota);

struct QuotaUse {
  Quota quota;
  uint64_t milliDevices = 0, memoryBytes = 0, deviceSeconds = 0;
  uint64_t windowEndsS = 0;
};

// What a tenant has on devices, or wants there: a part of a device's memory is that part of a device.
struct Held {
  double devices = 0;
  uint64_t bytes = 0;
  double seconds = 0;  // wanted: device-seconds, as far as that is known

  Held& operator+=(const Held& more) {
    devices += more.devices, bytes += more.bytes;
    return *this;
  }
};

struct WindowTimes {
  uint64_t beginS = 0, endS = 0;
};
WindowTimes windowAt(QuotaWindow window, uint64_t nowS);

class Quotas {
 public:
  // What is no such entry is left out.
  void load(const std::vector<Entry>& quotas, const std::vector<Entry>& hours);
  bool empty() const { return quotas_.empty(); }
  const std::map<std::string, Quota>& all() const { return quotas_; }
  // Its own, or every tenant's; null: it has none.
  const Quota* of(const std::string& tenant) const;
  void set(const Quota& quota);  // none(): takes it away
  static Write writeOf(const Quota& quota);

  void charge(const std::string& tenant, double deviceSeconds, uint64_t nowS);
  double used(const std::string& tenant, QuotaWindow window, uint64_t nowS) const;
  // Of the tenants that have used anything in a window that is not over.
  std::vector<std::string> tenants() const;
  // What has changed since the last time; what is over is forgotten.
  std::vector<Write> changes(uint64_t nowS);

  // Why the tenant can never have that much; "": it can.
  std::string never(const std::string& tenant, const Held& wanted) const;
  // Why it cannot have it beside what it has; "": it can.
  struct Hindrance {
    std::string text;
    uint64_t untilS = 0;  // not before then, whatever ends; 0: when enough of the tenant's leases have ended
  };
  Hindrance hinders(const std::string& tenant, const Held& has, const Held& wanted, uint64_t nowS) const;
  // The same, but for what it has used.
  std::string hindersAtOnce(const std::string& tenant, const Held& has, const Held& wanted) const;

 private:
  struct Count {
    uint64_t beginS = 0;
    double seconds = 0;
  };
  struct Account {
    std::array<Count, kQuotaWindows> counts;
    bool changed = false;
  };
  std::map<std::string, Quota> quotas_;
  std::map<std::string, Account> accounts_;
};

}  // namespace gpupool::pool

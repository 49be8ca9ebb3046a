#include "pool-manager/rest/metrics.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>

#include "pool-manager/listing.h"
#include "schema/lease_memory.h"

namespace gpupool::pool::rest {
namespace {

constexpr size_t kMostTenants = 100;  // more are "other": each is a series
constexpr size_t kMostCounted = 200;  // leases with series of their own

using Labels = std::vector<std::pair<const char*, std::string>>;

// Prometheus takes a page with one bad byte for none: names come from other machines.
std::string quoted(const std::string& value) {
  return Json(printable(value, 256)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.15g", value);
  return text;
}

class Page {
 public:
  void begin(const std::string& name, const char* type, const char* help) {
    name_ = name;
    text_ += "# HELP " + name + " " + help + "\n# TYPE " + name + " " + type + "\n";
  }
  void add(const Labels& labels, double value, const char* suffix = "") {
    text_ += name_ + suffix;
    std::string inside;
    for (const auto& [name, label] : labels)
      inside += (inside.empty() ? "" : ",") + (name + ("=" + quoted(label)));
    if (!inside.empty()) text_ += "{" + inside + "}";
    text_ += " " + number(value) + "\n";
  }
  void histogram(const std::string& name, const char* help, const Histogram& from) {
    begin(name, "histogram", help);
    uint64_t sum = 0;
    for (size_t i = 0; i < from.buckets().size(); ++i) {
      sum += from.buckets()[i];
      const bool last = i == Histogram::kBounds.size();
      add({{"le", last ? "+Inf" : number(Histogram::kBounds[i])}}, static_cast<double>(sum), "_bucket");
    }
    add({}, from.sum(), "_sum");
    add({}, static_cast<double>(sum), "_count");
  }
  std::string text() && { return std::move(text_); }

 private:
  std::string name_, text_;
};

void addLeases(const Pool& pool, const Principal& who, Page& page) {
  std::map<std::string, std::array<uint64_t, kLeaseStates>> tenants;
  for (const auto& [id, record] : pool.leases()) {
    const bool named =
        who.owns(record.tenant) && (tenants.size() < kMostTenants || tenants.contains(record.tenant));
    ++tenants[named ? record.tenant : "other"][static_cast<uint32_t>(record.state)];
  }
  page.begin("gpupool_leases", "gauge",
             "Leases by state and tenant; of other tenants than the reader's: other.");
  for (const auto& [tenant, states] : tenants)
    for (uint32_t i = 0; i < kLeaseStates; ++i)
      if (states[i] != 0)
        page.add({{"state", std::string(name(static_cast<LeaseState>(i)))}, {"tenant", tenant}},
                 static_cast<double>(states[i]));
}

// Leases that the reader may see, the oldest first: those that have series keep them. A sum of the others
// would fall when one of them ends, which no counter may.
std::vector<const LeaseRecord*> countedLeases(const Pool& pool, const Principal& who) {
  std::vector<const LeaseRecord*> counted;
  for (const auto& [id, record] : pool.leases())
    if (who.owns(record.tenant) && record.totals.counted()) counted.push_back(&record);
  std::sort(counted.begin(), counted.end(), [](const LeaseRecord* one, const LeaseRecord* other) {
    return std::pair(one->grantedMs, one->id) < std::pair(other->grantedMs, other->id);
  });
  return counted;
}

void addLeaseCounts(const Context& context, const Principal& who, Page& page) {
  auto leases = countedLeases(context.service.pool(), who);
  const size_t leftOut = leases.size() - std::min(leases.size(), kMostCounted);
  leases.resize(leases.size() - leftOut);
  const auto labelsOf = [](const LeaseRecord& lease) {
    return Labels{{"lease", lease.id.text()}, {"tenant", lease.tenant}};
  };
  const auto each = [&](const char* name, const char* help, uint64_t LeaseCounts::* count) {
    page.begin(name, "counter", help);
    for (const LeaseRecord* lease : leases)
      page.add(labelsOf(*lease), static_cast<double>(lease->totals.total().*count));
  };
  each("gpupool_lease_calls_total", "CUDA calls of a lease's programs that have come to its workers.",
       &LeaseCounts::calls);
  each("gpupool_lease_awaited_calls_total", "Of these, those whose answer the program has waited for.",
       &LeaseCounts::awaited);
  each("gpupool_lease_copied_to_device_bytes_total", "Bytes of copies from a lease's programs to its GPUs.",
       &LeaseCounts::toDeviceBytes);
  each("gpupool_lease_copied_from_device_bytes_total", "Bytes of copies from a lease's GPUs to its programs.",
       &LeaseCounts::fromDeviceBytes);
  page.begin("gpupool_lease_checkpoint_age_seconds", "gauge",
             "Of a protected lease: how old the checkpoint is that a session would go on from, the oldest.");
  for (const LeaseRecord* lease : leases)
    if (const auto age = lease->totals.checkpointAgeMs(context.service.now()))
      page.add(labelsOf(*lease), static_cast<double>(*age) / 1000);
  page.begin("gpupool_leases_without_series", "gauge",
             "Leases of which nothing is told above: those beyond the 200 oldest.");
  page.add({}, static_cast<double>(leftOut));
}

void addServers(const Context& context, Page& page) {
  const Pool& pool = context.service.pool();
  const uint64_t now = context.service.now();
  unsigned alive = 0, absent = 0;
  for (const auto& [name, server] : pool.servers()) alive += pool.alive(server, now);
  for (const auto& [name, cordon] : pool.cordons()) absent += !pool.servers().contains(name);
  page.begin("gpupool_servers", "gauge", "Servers by state.");
  page.add({{"state", "alive"}}, alive);
  page.add({{"state", "lost"}}, static_cast<double>(pool.servers().size() - alive));
  page.add({{"state", "absent"}}, absent);

  const auto each = [&](const char* name, const char* type, const char* help, auto&& value) {
    page.begin(name, type, help);
    for (const auto& [server, record] : pool.servers())
      page.add({{"server", server}}, static_cast<double>(value(server, record)));
  };
  each("gpupool_server_alive", "gauge", "1: the server is heard of; 0: it is not.",
       [&](const std::string&, const ServerRecord& record) { return pool.alive(record, now); });
  each("gpupool_server_cordoned", "gauge", "1: nothing new is placed on the server.",
       [&](const std::string& name, const ServerRecord&) { return pool.cordons().contains(name); });
  each("gpupool_server_warm_workers", "gauge", "Workers that wait for sessions.",
       [](const std::string&, const ServerRecord& record) { return record.warmWorkers; });
  each("gpupool_server_missed_beats_total", "counter", "Reports that did not come when they should have.",
       [&](const std::string& name, const ServerRecord&) {
         const auto& missed = context.service.counters().missedBeats;
         const auto at = missed.find(name);
         return at == missed.end() ? 0 : at->second;
       });
}

Labels labelsOf(const ServerUse& server, const DeviceUse& device) {
  return {{"server", server.name},
          {"gpu", std::to_string(device.info.ordinal)},
          {"UUID", uuidText(device.info.uuid)},
          {"modelName", device.info.name}};
}

// By the names and units of NVIDIA's exporter (dcgm-exporter), of the GPUs of which a server says something.
void addSamples(const Context& context, const std::vector<ServerUse>& servers, Page& page) {
  struct Figure {
    const char *name, *type, *help;
    std::optional<double> (*value)(const DeviceSample& sample);
  };
  using Value = std::optional<double>;
  constexpr double kMiB = 1 << 20;
  static const Figure kFigures[] = {
      {"DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %).",
       [](const DeviceSample& one) { return one.gpuPercent < 0 ? Value() : Value(one.gpuPercent); }},
      {"DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", "Memory utilization (in %).",
       [](const DeviceSample& one) { return one.memoryPercent < 0 ? Value() : Value(one.memoryPercent); }},
      {"DCGM_FI_DEV_FB_USED", "gauge", "Device memory in use (in MiB).",
       [](const DeviceSample& one) {
         return one.totalBytes == 0 ? Value() : Value(static_cast<double>(one.usedBytes) / kMiB);
       }},
      {"DCGM_FI_DEV_FB_FREE", "gauge", "Device memory that is not in use (in MiB).",
       [](const DeviceSample& one) {
         return one.totalBytes < one.usedBytes || one.totalBytes == 0
                    ? Value()
                    : Value(static_cast<double>(one.totalBytes - one.usedBytes) / kMiB);
       }},
      {"DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C).",
       [](const DeviceSample& one) {
         return one.temperatureC == DeviceSample::kNoTemperature ? Value() : Value(one.temperatureC);
       }},
      {"DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W).",
       [](const DeviceSample& one) { return one.powerMw == 0 ? Value() : Value(one.powerMw / 1000.0); }},
      {"DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock frequency (in MHz).",
       [](const DeviceSample& one) { return one.smMhz == 0 ? Value() : Value(one.smMhz); }},
      {"DCGM_FI_DEV_MEM_CLOCK", "gauge", "Memory clock frequency (in MHz).",
       [](const DeviceSample& one) { return one.memoryMhz == 0 ? Value() : Value(one.memoryMhz); }},
      {"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "counter", "Uncorrected ECC errors since the driver was loaded.",
       [](const DeviceSample& one) {
         return one.eccErrors < 0 ? Value() : Value(static_cast<double>(one.eccErrors));
       }},
      {"DCGM_FI_DEV_XID_ERRORS", "gauge", "The last critical Xid since the server was started.",
       [](const DeviceSample& one) { return Value(one.xid); }},
      // The exporter has NVLinks' bytes and errors, but not how many are up.
      {"gpupool_device_nvlinks_up", "gauge", "NVLinks of the GPU that are up.",
       [](const DeviceSample& one) { return one.nvlinks < 0 ? Value() : Value(one.nvlinks); }},
  };
  std::vector<std::pair<Labels, DeviceSample>> samples;
  for (const ServerUse& server : servers)
    for (const DeviceUse& device : server.devices)
      if (const auto sample =
              context.service.pool().sample(server.name, device.info.uuid, context.service.now())) {
        samples.emplace_back(labelsOf(server, device), *sample);
        samples.back().first.emplace_back("Hostname", server.name);
      }
  for (const Figure& figure : kFigures) {
    page.begin(figure.name, figure.type, figure.help);
    for (const auto& [labels, sample] : samples)
      if (const auto value = figure.value(sample)) page.add(labels, *value);
  }
}

void addDevices(const Context& context, const Principal& who, Page& page) {
  const auto servers = context.service.pool().inventory(who, context.service.now());
  // Of what may be leased (DeviceUse); free only where something can be placed now, as in `gpupool devices`.
  const auto each = [&](const char* name, const char* help, auto&& value) {
    page.begin(name, "gauge", help);
    for (const ServerUse& server : servers)
      for (const DeviceUse& device : server.devices)
        page.add(labelsOf(server, device), static_cast<double>(value(server, device)));
  };
  const auto healthy = [](const DeviceUse& device) {
    return device.info.problem.empty() && device.duplicateOf.empty();
  };
  each("gpupool_device_healthy", "1: nothing is known to be wrong with the device; 0: it cannot be leased.",
       [&](const ServerUse&, const DeviceUse& device) { return healthy(device); });
  each("gpupool_device_memory_bytes", "The device's memory.",
       [](const ServerUse&, const DeviceUse& device) { return device.info.memoryBytes; });
  each("gpupool_device_memory_leased_bytes", "Of what may be leased of it, so much is.",
       [](const ServerUse&, const DeviceUse& device) {
         return leasableBytes(device.info.memoryBytes, device.overcommitPercent) - device.freeBytes;
       });
  each("gpupool_device_memory_free_bytes", "So much can be leased now.",
       [&](const ServerUse& server, const DeviceUse& device) {
         return healthy(device) && server.unusable.empty() ? device.freeBytes : 0;
       });
  addSamples(context, servers, page);
}

}  // namespace

kj::Promise<Answer> metrics(const Context& context, const Request& request) {
  const Pool& pool = context.service.pool();
  const Counters& counters = context.service.counters();
  Page page;
  page.begin("gpupool_build_info", "gauge", "The manager's version.");
  page.add({{"version", GPUPOOL_VERSION}}, 1);
  addLeases(pool, request.who, page);
  addLeaseCounts(context, request.who, page);
  page.begin("gpupool_lease_requests_waiting", "gauge",
             "Requests in the queue, those to resume a lease too.");
  page.add({}, static_cast<double>(pool.waiting()));
  page.histogram("gpupool_lease_wait_seconds",
                 "From a request for a lease to its devices, of those that got them.", counters.leaseWaits);
  page.histogram("gpupool_grant_seconds", "From telling a server of a lease to its word.", counters.grants);
  page.histogram(
      "gpupool_manager_delay_seconds",
      "How much later than it was due the manager's clock ticked: what a request waits for others.",
      counters.delays);
  addServers(context, page);
  addDevices(context, request.who, page);
  Answer answer;
  answer.text = std::move(page).text();
  return answer;
}

}  // namespace gpupool::pool::rest

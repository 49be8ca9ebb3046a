#pragma once
// The manager's configuration: etc/manager.yaml, GPUPOOL_MANAGER_*, and the command line of gpupool-manager.

#include "base/options.h"

namespace gpupool::pool {

struct ManagerOptions {
  std::string listen;
  std::string socket;
  std::string httpListen;
  std::string store = "/var/lib/gpupool/manager.db";
  std::string tokens;
  std::string tls = "auto";
  std::string tlsCertificate, tlsKey;
  bool anyUser = false;
  std::chrono::milliseconds beat{1000};
  std::chrono::milliseconds silent{5000};
  std::chrono::milliseconds minTtl{1000};
  std::chrono::milliseconds maxTtl{std::chrono::hours(1)};
  std::chrono::milliseconds drift{500};
  std::chrono::milliseconds kill{3000};
  std::chrono::milliseconds takeOver{1500};
  std::chrono::milliseconds call{5000};
  std::chrono::milliseconds idleRelease{0}, mostIdle{0};
  std::string preempt = "off";
  std::chrono::milliseconds preemptGrace{std::chrono::seconds(30)}, preemptNotice{std::chrono::seconds(30)};
  std::chrono::milliseconds preemptMinRun{std::chrono::minutes(10)};
  std::chrono::milliseconds halfLife{std::chrono::hours(24)};
  std::string weights;
  uint32_t auditEntries = 10'000;

  std::vector<options::Option> table();
  // Where the certificate and its key are, or would be: beside the store, where the options name none.
  std::string certificateFile() const;
  std::string keyFile() const;
};

// Throws an OptionError.
void check(const ManagerOptions& options);

extern const char kManagerPrefix[];        // of its environment variables
extern const char kManagerIntroduction[];  // heads etc/manager.yaml

}  // namespace gpupool::pool

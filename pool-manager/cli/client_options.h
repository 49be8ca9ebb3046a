#pragma once
// What every command that leases or asks shares: etc/client.yaml, GPUPOOL_*, and options of the command line.

#include "base/options.h"
#include "base/tokens.h"

namespace gpupool::cli {

struct ClientOptions {
  std::string manager;
  uint32_t gpus = 1;
  options::Bytes memory;
  std::string gpu;
  std::string share;
  std::string priority = "normal";
  std::string transport;
  std::string networkDevice;
  std::string server;
  std::optional<bool> protect;  // none: as the tenant's leases are
  std::chrono::milliseconds protectInterval{30000};
  options::Bytes protectLog{uint64_t{2} << 30};
  options::Bytes protectLogData{uint64_t{4} << 30};
  std::string protectKeep = "holder";
  std::string protectDir;
  options::Bytes protectSize{uint64_t{8} << 30};
  std::chrono::milliseconds protectWait{300000};
  std::chrono::milliseconds protectSilence{2000};
  std::string onDivergence = "stop";
  bool spread = false;
  bool pack = false;
  std::string reason;
  std::chrono::milliseconds time{0};
  std::chrono::milliseconds idleRelease{0};
  std::string claim;
  std::string tenant;
  std::string tokenFile;
  std::string tlsCa;
  std::chrono::milliseconds wait{0};
  std::chrono::milliseconds ttl{15000};
  std::chrono::milliseconds stallTime{30000};

  std::vector<options::Option> table();
};

// Throws an OptionError if there is no transport of that name.
void checkTransport(const std::string& name);
// Throws an OptionError if `text` is longer than what the manager takes. option: "--reason".
void checkReason(const std::string& text);
void checkTenant(const std::string& option, const std::string& tenant);
// What the options say of who asks. Throws an OptionError or std::runtime_error.
CredentialSource credentialsOf(const ClientOptions& client);

extern const char kClientPrefix[];
extern const char kClientIntroduction[];

// The configuration file that is read: GPUPOOL_CONFIG, else the first that exists of
// ~/.config/gpupool/client.yaml, <prefix>/etc/gpupool/client.yaml and /etc/gpupool/client.yaml. Empty: none.
std::string clientConfigFile();

}  // namespace gpupool::cli

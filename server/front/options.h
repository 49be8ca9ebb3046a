#pragma once
// gpupool-server's options: file, environment (GPUPOOL_SERVER_*), command line.

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/options.h"
#include "server/spawner/user_range.h"
#include "server/walls/walls.h"

namespace gpupool::server {

struct ServerOptions {
  std::string manager = "127.0.0.1:4780";
  std::string tokenFile;
  std::string tlsCa;
  std::string name;
  std::string state;
  std::string local;
  std::string listen;
  std::string advertise;
  std::string driver;
  std::string devices;
  std::string deviceLocks;
  std::string worker;
  std::string workers;
  std::string walls = "auto";
  std::string workerUsers;
  uint32_t warm = 2;
  bool warmContexts = true;
  std::string networkDevice;
  std::string fabric = "libibverbs.so.1";
  std::string nvml;
  std::string networkWire = "auto";
  std::string moduleCache;
  options::Bytes moduleCacheSize{uint64_t{8} << 30};
  std::string suspendMemory;
  std::string suspendFolder;
  options::Bytes suspendMemoryAhead{0};
  options::Bytes protectMemory{uint64_t{4} << 30};
  std::string checkpointFolder;
  std::string overcommit = "1.0";
  std::chrono::milliseconds turnTime{10'000};
  std::chrono::milliseconds handshakeTime{2000};
  std::chrono::milliseconds stopTime{2000};
  std::chrono::milliseconds restartTime{30'000};
  std::chrono::milliseconds clientStallTime{0};
  std::chrono::milliseconds driverWait{0};

  std::vector<options::Option> table();
  static const char kPrefix[];                  // of its environment variables
  static const char kIntroduction[];            // heads etc/server.yaml
  std::vector<std::string> deviceList() const;  // --devices, taken apart
  // Where files of this server lie, to which each adds its ending; the same in every life of it.
  std::string identity() const { return state + "/server-" + name; }
  std::string doors() const { return identity() + ".doors"; }  // front/doors.h
  server::walls::Mode wallsMode() const;                       // --walls, taken apart; after complete
  std::optional<UserRange> userRange() const;  // --worker-users, taken apart; none: it is empty
  uint64_t suspendBytes = 0;                   // --suspend-memory, by complete
  uint32_t overcommitPercent = 100;            // --overcommit, by complete
  // Fills what depends on the machine: name, worker, state, local and others. Throws options::OptionError.
  void complete();
};

}  // namespace gpupool::server

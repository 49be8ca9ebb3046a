#pragma once
// What a checkpoint is of (schema/checkpoint.capnp), as a value, and as the bytes of its file.

#include <span>
#include <string>
#include <vector>

#include "schema/id.h"
#include "server/files/session_file.h"

namespace gpupool::server {

inline constexpr char kManifestName[] = "manifest";
inline constexpr uint64_t kMostManifestBytes = uint64_t{1} << 20;

struct Manifest {
  struct Device {
    std::string name;
    bool software = false;
    uint64_t totalBytes = 0, memoryBytes = 0;
  };
  struct Session {
    Id session;
    uint64_t epoch = 0;
    uint32_t clientPid = 0;
    std::string command, transport;
    std::string file;
    FileFacts facts;  // driverVersion is the manifest's; rowsHash, too, where it has none
  };
  Id id, lease;
  std::string tenant, holder, server;
  uint64_t writtenS = 0;
  bool held = false;
  uint64_t rowsHash = 0;  // of its server's current worker program
  uint32_t driverVersion = 0;
  std::vector<Device> devices;
  std::vector<Session> sessions;
};

std::vector<std::byte> encodeManifest(const Manifest& manifest);
// Throws std::runtime_error, for people, if the bytes are none, or one of another version.
Manifest decodeManifest(std::span<const std::byte> bytes);

}  // namespace gpupool::server

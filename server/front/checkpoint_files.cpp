#include "server/front/checkpoint_files.h"

#include <stdexcept>

#include "server/files/session_file.h"

namespace gpupool::server {
namespace {

std::string describe(const Manifest::Device& device) {
  return device.name + (device.software ? " (a software GPU)" : "") + " of " +
         std::to_string(device.totalBytes) + " bytes";
}

// "" or why the checkpoint is none for this lease and these devices.
std::string judge(const Manifest& manifest, const Manifest& here, Written written) {
  if (manifest.lease != here.lease || manifest.tenant != here.tenant) return "it is of another lease";
  if (written == Written::held && (!manifest.held || manifest.id != here.id))
    return "it is not the one in which the lease is held";
  if (written == Written::running && manifest.held)
    return "the lease was held in it, and has gone on since it was restored";
  if (manifest.driverVersion != here.driverVersion) return "it was written with another driver";
  if (manifest.devices.size() != here.devices.size()) return "it is of another number of devices";
  for (size_t i = 0; i < manifest.devices.size(); ++i) {
    const auto &then = manifest.devices[i], &now = here.devices[i];
    if (then.name != now.name || then.software != now.software || then.totalBytes != now.totalBytes)
      return "it is of a " + describe(then) + ", and the device here is a " + describe(now);
  }
  return "";
}

}  // namespace

OpenCheckpoint openCheckpoint(const CheckpointFolder& folder, const std::string& name, const Manifest& here,
                              Written written) {
  const std::string path = folder.pathOf(name);
  const auto refuse = [&](const std::string& why) { throw std::runtime_error(path + ": " + why); };
  OpenCheckpoint open;
  const auto bytes = folder.read(name, kManifestName, kMostManifestBytes);
  try {
    open.manifest = decodeManifest(bytes);
  } catch (const std::exception& error) {
    refuse(error.what());
  }
  if (const std::string why = judge(open.manifest, here, written); !why.empty()) refuse(why);
  for (Manifest::Session& session : open.manifest.sessions) {
    open.files.push_back(folder.open(name, session.file));
    FileFacts found;
    if (const std::string why = checkFile(open.files.back(), session.facts, &found); !why.empty())
      refuse(session.file + ": " + why);
    session.facts.lastAside = found.lastAside;  // the manifest does not have it
  }
  return open;
}

}  // namespace gpupool::server

#pragma once
// A checkpoint as it is opened before anything is made of it: whole, and of this lease and these devices.

#include <string>
#include <vector>

#include "server/files/checkpoint_folder.h"
#include "server/files/manifest.h"

namespace gpupool::server {

struct OpenCheckpoint {
  Manifest manifest;              // its sessions' facts are those of their files
  std::vector<Descriptor> files;  // in the order of manifest.sessions
};

// How the checkpoint was written.
enum class Written {
  held,     // the lease left for it, and is in it: the one with the id of `here`
  running,  // the lease went on
};

// Reads and checks all of it. here: what a checkpoint of the lease would say now. Takes as long as the disk
// does: on a thread. Throws std::runtime_error with a text for people.
OpenCheckpoint openCheckpoint(const CheckpointFolder& folder, const std::string& name, const Manifest& here,
                              Written written);

}  // namespace gpupool::server

#pragma once
// Tests: GPUPOOL_DISTURB=KIND:SEED in the server's environment has workers ask for what is done to sessions,
// at moments that the seed chooses (server/worker/disturbance.h).

#include <string>
#include <vector>

namespace gpupool::server {

struct Disturb {
  // suspend: sessions are suspended and resumed. move: they are moved to another worker. stream: likewise,
  // but as if to another server. files: they are held in files and restored. kill: workers of protected
  // sessions kill themselves. begin: likewise, and no session gets a checkpoint. server: this server does so,
  // too, when it sees that.
  enum class Kind { none, suspend, move, stream, files, kill, begin, server };
  Kind kind = Kind::none;
  std::string seed;

  bool any() const { return kind != Kind::none; }
  // For the command line of each worker; none: no words.
  std::vector<std::string> workerArguments() const;
};

// Of this process's environment. Throws options::OptionError if that says something else.
Disturb disturbOfEnvironment();

}  // namespace gpupool::server

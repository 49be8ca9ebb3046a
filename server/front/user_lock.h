#pragma once
// A range of workers' user ids belongs to one server of a machine, for each ends what runs under its ids. The
// server that has it holds a lock on the bytes FIRST to LAST of one file, which is empty, in the folder that
// all servers of the machine share. Where they see different folders, in containers, nothing is noticed
// (docs/security.md).

#include <kj/io.h>

#include <string>

#include "server/spawner/user_range.h"

namespace gpupool::server {

class UserLock {
 public:
  // Taken until this is gone, or the process. One in a process. Throws options::OptionError if another
  // process has one of these ids, naming its range and pid, or if there is no telling.
  UserLock(const std::string& folder, const UserRange& users);

 private:
  kj::AutoCloseFd file_;
};

}  // namespace gpupool::server

#pragma once
// Files in the folder that all servers of a machine share (--device-locks), by which they keep apart.

#include <kj/io.h>

#include <string>

namespace gpupool::server {

// Opens it for reading and writing, and makes it if it is not there, for everybody: servers may have other
// users. what: for the error, "the lock of a GPU". Throws kj::Exception.
kj::AutoCloseFd openLockFile(const std::string& path, const char* what);

}  // namespace gpupool::server

#pragma once
// Paths: this installation's files, and the runtime directory of this machine's pool.

#include <string>
#include <vector>

namespace gpupool::cli {

std::string executableDirectory();  // of /proc/self/exe, symbolic links resolved
std::string
clientLibraryDirectory();      // <prefix>/lib/gpupool: our libcuda.so.1. GPUPOOL_LIBRARY_DIR overrides it
std::string softwareDriver();  // <prefix>/lib/libcuda-soft.so where it was built, else lib/gpupool/

// Names in a runtime directory. All that a pool leaves there is in kPoolFiles and kPoolFolder, so that
// `gpupool down` removes what is ours and nothing else.
inline constexpr char kManagerSocket[] = "manager.sock", kServerSocket[] = "server.sock",
                      kStore[] = "manager.db", kLock[] = "pool.lock", kProcesses[] = "pool.processes",
                      kManagerLog[] = "manager.log", kServerLog[] = "server.log", kPoolLog[] = "pool.log",
                      kServerFolder[] = "server";
inline constexpr const char* kPoolFiles[] = {
    kManagerSocket, kServerSocket, "manager.db-wal", "manager.db-shm", kStore,
    kProcesses,     kManagerLog,   kServerLog,       kPoolLog,         kLock};

// Where the pool of this machine may be: `chosen` (--state) alone, or GPUPOOL_STATE alone, or
// $XDG_RUNTIME_DIR/gpupool and /tmp/gpupool-<uid>. The first is where a new one goes.
// Throws std::runtime_error if the named one is too long for a Unix socket in it.
std::vector<std::string> runtimeDirectories(const std::string& chosen = "");

// Makes `path` a directory that only this user can enter. Throws std::runtime_error if it belongs to another
// user, is a link, or is too long for a Unix socket in it.
void makePrivateDirectory(const std::string& path);

// The addresses to try for a manager, in order: from a list as in ClientOptions.manager, or this machine's
// pools.
std::vector<std::string> managerAddresses(const std::string& list);
// One line for the user. tried: "address: why; address: why", of these addresses.
std::string noManagerText(const std::vector<std::string>& addresses, const std::string& tried);

}  // namespace gpupool::cli

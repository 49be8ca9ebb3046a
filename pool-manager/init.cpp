#include "pool-manager/init.h"

#include <ctime>
#include <filesystem>
#include <iostream>
#include <stdexcept>

#include "base/tls.h"
#include "pool-manager/journal.h"
#include "pool-manager/store/store.h"
#include "pool-manager/tokens.h"
#include "schema/id.h"

namespace gpupool::pool {
namespace {

// That is there, or a new one.
Fingerprint certificate(const ManagerOptions& options) {
  const std::string file = options.certificateFile(), key = options.keyFile();
  if (!std::filesystem::exists(file)) tls::makeCertificate(file, key);
  return tls::Certificate(file, key).fingerprint();
}

}  // namespace

int printCertificate(const ManagerOptions& options) {
  if (options.store == "memory" && options.tlsCertificate.empty())
    throw options::OptionError(
        "certificate: --store memory has no files: give --tls-certificate and --tls-key");
  const bool made = !std::filesystem::exists(options.certificateFile());
  std::cout << certificateLine(certificate(options)) << '\n' << std::flush;
  std::cerr << "gpupool-manager: " << options.certificateFile() << (made ? " is made" : " was there")
            << "; the line on stdout is for the token files of those who connect\n";
  return 0;
}

int initStore(const ManagerOptions& options) {
  if (options.store == "memory") throw options::OptionError("init: --store memory keeps no token");
  const auto store = openSqliteStore(options.store);
  const Journal journal(*store, Id::random().text(), nullptr);
  if (!store->range(kTokenPrefix).empty())
    throw std::runtime_error(
        "the store " + options.store +
        " has tokens already: `gpupool tokens create --role operator operator`, as the user "
        "that runs the manager and on its machine, makes another one");
  TokenWish wish;
  wish.tenant = kOperatorsTenant;
  wish.name = "first";
  wish.role = Role::admin;
  wish.by = "gpupool-manager init";
  const MadeToken made = makeToken(wish, static_cast<uint64_t>(std::time(nullptr)));
  const Outcome outcome = store->commitNow({{}, {writeOf(made.token)}});
  if (!outcome.committed()) throw std::runtime_error("not stored: " + outcome.why);
  std::cout << made.token.tenant << ": " << made.text << "\n";
  if (options.tls != "off") std::cout << certificateLine(certificate(options)) << "\n";
  std::cout << std::flush;
  std::cerr << "gpupool-manager: what is on stdout is the operator's token file (mode 0600); it is not shown "
               "again. From now on the manager of "
            << options.store << " demands tokens\n";
  return 0;
}

}  // namespace gpupool::pool

#pragma once
// The transports by name, and what a program that uses none of their code has to know of them: the manager's
// tool, which chooses one, and the server, which listens for it. Their code is transports/; what listens and
// connects there is in the table of transports/factory.cpp.

#include <algorithm>
#include <string>
#include <string_view>

namespace gpupool {

struct TransportFacts {
  enum class Reach {
    sameHost,  // client and server share memory: a session begins on the server's Unix socket
    anyHost    // a session begins on the server's network address
  };
  std::string_view name;
  Reach reach;
};

// In order of preference: the first that reaches the server is taken.
inline constexpr TransportFacts kTransports[] = {
    {"shm", TransportFacts::Reach::sameHost},
    {"ucx", TransportFacts::Reach::anyHost},
};

constexpr const TransportFacts* findTransport(std::string_view name) {
  for (const TransportFacts& one : kTransports)
    if (one.name == name) return &one;
  return nullptr;
}

// The first with that reach.
constexpr const TransportFacts& transportWith(TransportFacts::Reach reach) {
  return *std::find_if(std::begin(kTransports), std::end(kTransports),
                       [&](const TransportFacts& one) { return one.reach == reach; });
}

// A session over `transport` goes on over that one at a worker that does not share its client's memory.
constexpr std::string_view transportApart(std::string_view transport) {
  const TransportFacts* facts = findTransport(transport);
  const bool shares = facts != nullptr && facts->reach == TransportFacts::Reach::sameHost;
  return shares ? transportWith(TransportFacts::Reach::anyHost).name : transport;
}

// Their names, for messages: "shm|ucx", "shm or ucx".
inline std::string transportChoices(const std::string& between) {
  std::string names;
  for (const TransportFacts& one : kTransports)
    names += (names.empty() ? "" : between) + std::string(one.name);
  return names;
}

}  // namespace gpupool

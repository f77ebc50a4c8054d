#pragma once

/// Peers of tests, as shell scripts that speak rounds.h.

#include <string>
#include <vector>

namespace bulkhead::bench {

inline std::vector<std::string> script(const std::string& text) {
    return {"sh", "-c", "zeros() { head -c \"$1\" < /dev/zero; }; " + text};
}
inline const std::string ready = "zeros 8; ";               // nothing keeps it from taking part
inline const std::string word = "head -c 8 > /dev/null; ";  // a round is asked for
/// A round of one request, which took 1 us.
inline const std::string one_us = "printf '\\001'; zeros 7; zeros 6; printf '\\360\\077'; zeros 24; ";

}  // namespace bulkhead::bench

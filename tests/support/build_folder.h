#pragma once

#include <cstdlib>
#include <filesystem>

namespace bulkhead::test {

/// The build's programs, libraries and test models: $BULKHEAD_BUILD where they were carried to
/// another machine, else the folder that this was built in.
inline std::filesystem::path build_folder() {
    const char* carried = std::getenv("BULKHEAD_BUILD");
    return carried != nullptr ? carried : BULKHEAD_BINARY_DIR;
}

}  // namespace bulkhead::test

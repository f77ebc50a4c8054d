#pragma once

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace bulkhead::test {

/// What is in a file; empty where it cannot be read, such as that of a process that ends
/// in the meantime.
inline std::string file_text(const std::filesystem::path& path) {
    std::ostringstream text;
    std::ifstream file{path, std::ios::binary};
    text << file.rdbuf();  // an iterator over the buffer would throw what reading fails with
                           // (ESRCH, EISDIR)
    return text.str();
}

}  // namespace bulkhead::test

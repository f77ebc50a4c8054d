#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace bulkhead::cli {

/// A folder of mode 0700 that goes with its contents.
class TemporaryFolder {
public:
    TemporaryFolder() {
        std::string pattern = std::filesystem::temp_directory_path() / "bulkhead-cli-XXXXXX";
        if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error{"mkdtemp"};
        path_ = pattern;
    }
    ~TemporaryFolder() { std::filesystem::remove_all(path_); }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;

    [[nodiscard]] const std::filesystem::path& path() const { return path_; }
    std::filesystem::path write(const std::string& name, std::string_view bytes) const {
        std::ofstream{path_ / name, std::ios::binary} << bytes;
        return path_ / name;
    }

private:
    std::filesystem::path path_;
};

}  // namespace bulkhead::cli

#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace bulkhead::test {

/// A folder of mode 0700 and a short name, removed with what is in it.
class TemporaryFolder {
public:
    explicit TemporaryFolder(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
        std::string pattern = parent / "bh-XXXXXX";
        if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error{"mkdtemp " + pattern};
        path_ = pattern;
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;

    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
    std::filesystem::path write(const std::string& name, std::string_view bytes) const {
        std::ofstream{path_ / name, std::ios::binary} << bytes;
        return path_ / name;
    }

private:
    std::filesystem::path path_;
};

}  // namespace bulkhead::test

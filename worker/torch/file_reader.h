#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

#include <caffe2/serialize/read_adapter_interface.h>
#include <fmt/format.h>

#include "worker/file/model_file.h"

namespace bulkhead::worker {

/// Reads a model's file for LibTorch; must not outlive it.
/// Throws  std::runtime_error if reading fails
class FileReader final : public caffe2::serialize::ReadAdapterInterface {
public:
    /// `progress` gets the number of bytes read.
    FileReader(const ModelFile& file, std::function<void(std::uint64_t)> progress)
        : file_{file}, progress_{std::move(progress)} {}

    std::size_t size() const override { return file_.size_bytes(); }

    std::size_t read(std::uint64_t offset, void* target, std::size_t count, const char* what) const override {
        const auto got = file_.read({static_cast<std::byte*>(target), count}, offset);
        if (!got) throw std::runtime_error{fmt::format("{}: {}", what, std::strerror(errno))};
        done_ = std::min(done_ + *got, file_.size_bytes());
        if (progress_) progress_(done_);
        return *got;
    }

private:
    const ModelFile& file_;
    std::function<void(std::uint64_t)> progress_;
    mutable std::uint64_t done_ = 0;
};

}  // namespace bulkhead::worker

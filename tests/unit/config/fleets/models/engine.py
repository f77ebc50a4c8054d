# An engine; config tests look only whether it is there.

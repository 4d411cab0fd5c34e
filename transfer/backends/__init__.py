"""Store backends, chosen by the scheme of the store's address."""
